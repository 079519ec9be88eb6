"""Train a language model of Hugging Face Transformers under GPipe, beside the model itself.

A decoder (Llama and its kin, or GPT-2) is made from its config, without a download, and its blocks
are put into an nn.Sequential. They stay the blocks of the decoder, so save_pretrained() of the
decoder saves the trained weights. The decoder learns to spell from the lines of the README, which
differ in length, so that batches have padding. Embedding and head share one weight, so they have to
be on one device: the first and the last partition are on the first device, the others on others.

    pip install transformers
    python -m examples.language_model
    python -m examples.language_model --family gpt2 --attention eager --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_time

PARTITIONS = 4
README = Path(__file__).parent.parent / "README.rst"


class Embed(nn.Module):
    """The layers of a decoder ahead of its blocks; they return a dict of a block's arguments."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.config = decoder.config
        if isinstance(self.config, GPT2Config):
            self.tokens, self.places, self.dropout = decoder.wte, decoder.wpe, decoder.drop
        else:
            self.tokens, self.rotary = decoder.embed_tokens, decoder.rotary_emb

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Any]:
        x = self.tokens(input_ids)
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        if isinstance(self.config, GPT2Config):
            x = self.dropout(x + self.places(places))
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=places,
        )
        values = {"hidden_states": x, "attention_mask": mask}
        if not isinstance(self.config, GPT2Config):
            values["position_embeddings"] = self.rotary(x, position_ids=places)
        return values


class Block(nn.Module):
    """A block of a decoder, which takes and returns a dict of the arguments of a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, "hidden_states": self.block(**values)}


class Head(nn.Module):
    """The last normalisation of a decoder, and its head, which computes the logits."""

    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, values: dict[str, Any]) -> Tensor:
        logits: Tensor = self.head(self.norm(values["hidden_states"]))
        return logits


def sequential(model: PreTrainedModel) -> nn.Sequential:
    """The same layers as in a causal language model, in an nn.Sequential."""
    decoder: Any = model.base_model
    gpt2 = isinstance(model.config, GPT2Config)
    blocks, norm = (decoder.h, decoder.ln_f) if gpt2 else (decoder.layers, decoder.norm)
    head = model.get_output_embeddings()
    return nn.Sequential(Embed(decoder), *[Block(block) for block in blocks], Head(norm, head))


def language_model(family: str = "llama", attention: str = "sdpa", **config: Any) -> Any:
    """A small decoder over bytes, with random weights."""
    common: dict[str, Any] = {"vocab_size": 256, "attn_implementation": attention}
    common |= {
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "use_cache": False,
    }
    if family == "gpt2":
        sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
        sizes |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**common | sizes | config))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return LlamaForCausalLM(LlamaConfig(**common | sizes | config))


def rows(length: int = 64) -> dict[str, Tensor]:
    """The lines of the README as a decoder takes them: rows of bytes, padded at the end."""
    lines = [line[:length] for line in README.read_bytes().splitlines() if line.strip()]
    input_ids = pad_sequence([torch.tensor([*line]) for line in lines], batch_first=True)
    mask = (input_ids > 0).long()
    labels = input_ids.masked_fill(mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def wrap(model: Any, sample: Tensor, **options: Any) -> GPipe:
    """A language model under GPipe, with its embedding and its head on the first device.

    Args:
        model: the language model, whose blocks are moved.
        sample: the tokens of a micro-batch, to balance the partitions by.
        **options: further options of GPipe.
    """
    layers = sequential(model)
    devices = places(PARTITIONS - 1)
    balance = balance_by_time(
        PARTITIONS - 1,
        layers[:-1],
        sample,
        timeout=0.3,
        device=devices[0],
    )
    return GPipe(layers, [*balance, 1], devices=[*devices, devices[0]], **options)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss over all tokens of a mini-batch, of which each predicts the next one.

    The loss is outside of the model: micro-batches have unequal padding, so the mean of their means
    would be another number.
    """
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device))


def main(arguments: list[str] | None = None) -> int:
    """Train a decoder with and without GPipe; return 0 if both learn the same."""
    parser = argparse.ArgumentParser(description="Train a decoder with and without GPipe.")
    parser.add_argument("--family", choices=["llama", "gpt2"], default="llama")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--epochs", type=at_least(2), default=4)
    parser.add_argument("--rows", type=at_least(1), default=128, help="how many lines to train on")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # In double precision, where the normalisations and the loss of Transformers allow it.
    model = language_model(options.family, options.attention).double()
    plain = copy.deepcopy(model)
    data = {name: x[: options.rows] for name, x in rows().items()}
    sample = data["input_ids"][: max(1, 32 // options.chunks)]
    pipe = wrap(model, sample, chunks=options.chunks, checkpoint=options.checkpoint)
    first = pipe.devices[0]
    plain.to(first)
    print(f"{len(pipe)} layers in partitions of {pipe.balance} on {[*map(str, pipe.devices)]}")

    optimizers = [torch.optim.AdamW(x.parameters(), lr=0.003) for x in (pipe, plain)]
    history, largest = [], 0.0
    print(f"{'epoch':>5}  {'GPipe':>9}  {'plain':>9}  {'difference':>10}")
    for epoch in range(options.epochs):
        totals = torch.zeros(2, dtype=torch.double)
        order = torch.randperm(len(data["labels"])).split(32)
        for chosen in order:
            batch = {name: x[chosen].to(first) for name, x in data.items()}
            labels = batch.pop("labels")
            losses = [loss_of(pipe(**batch), labels), loss_of(plain(**batch).logits, labels)]
            for optimizer, loss in zip(optimizers, losses):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            largest = max(largest, abs(losses[0].item() - losses[1].item()))
            totals += torch.stack(losses).detach().cpu() / len(order)
        history.append(totals)
        print(f"{epoch + 1:5}  {totals[0]:9.6f}  {totals[1]:9.6f}  {totals[0] - totals[1]:10.1e}")

    # The blocks are still blocks of the decoder, which has the trained weights by its own names.
    learnt = all(torch.allclose(a.cpu(), b.cpu(), atol=1e-3) for a, b in both(model, plain))
    if largest < 1e-4 and learnt and history[-1][0] < history[0][0]:
        print(f"\nBoth learnt the same: the losses of a step differ by {largest:.1e} at most.")
        return 0
    print(
        f"\nNot as it should be: losses differ by up to {largest:.1e}, or weights, or do not fall."
    )
    return 1


def both(a: nn.Module, b: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The weights of two models, in pairs."""
    others = b.state_dict()
    return [(x, others[name]) for name, x in a.state_dict().items()]


if __name__ == "__main__":
    sys.exit(main())
