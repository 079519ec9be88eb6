"""Train a language model under GPipe with Transformers' Trainer, beside the model itself.

The model stays a LlamaForCausalLM, with its names, its loss and its save_pretrained(). But its
forward sends the tokens through a GPipe of its own blocks. hf_device_map tells the Trainer that the
blocks are on their devices, so the Trainer neither moves the model nor wraps it in nn.DataParallel.
Embedding and head, and so the loss, are on the first device, where the Trainer puts the batches.

    pip install accelerate transformers
    python -m examples.with_transformers
    python -m examples.with_transformers --accumulate 4 --precision bf16
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

from examples.language_model import language_model, rows, wrap
from examples.options import at_least
from torchgpipe import GPipe


class PipelinedLlamaForCausalLM(LlamaForCausalLM):
    """A Llama that computes its logits under GPipe, once its blocks are on their devices.

    Transformers chooses the loss by the end of the name of the class.
    """

    pipe: GPipe

    def spread(self, sample: Tensor, **options: Any) -> PipelinedLlamaForCausalLM:
        """Put the blocks on their devices."""
        # Not as a submodule, or each weight would have two names.
        self.__dict__["pipe"] = wrap(self, sample, **options)
        return self

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        return self.pipe.hf_device_map

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        self.pipe.train(self.training)
        logits = self.pipe(input_ids, attention_mask)
        loss = None
        if labels is not None:
            # The kwargs say how many tokens the mini-batches of a step have.
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


class Rows(Dataset[dict[str, Tensor]]):
    """Lines of text, with padding."""

    def __init__(self, number: int) -> None:
        self.columns = {name: x[:number] for name, x in rows().items()}

    def __len__(self) -> int:
        return len(self.columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: x[index] for name, x in self.columns.items()}


def trainer(model: nn.Module, folder: str, options: argparse.Namespace, **others: Any) -> Trainer:
    """A Trainer as for any model."""
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=0.003,
        max_grad_norm=1.0,
        bf16=options.precision == "bf16",
        logging_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.accelerator.is_available(),
        **others,
    )
    data = Rows(options.rows)
    return Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data)


def losses(trainer: Trainer) -> list[float]:
    """The mean loss of each epoch."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(arguments: list[str] | None = None) -> int:
    """Train with and without GPipe; return 0 if both learn the same, also after a restart."""
    parser = argparse.ArgumentParser(description="Train a GPipe with Transformers' Trainer.")
    parser.add_argument("--epochs", type=at_least(2), default=4)
    parser.add_argument("--rows", type=at_least(1), default=128, help="how many lines to train on")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--accumulate", type=at_least(1), default=2, help="mini-batches for a step")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    torch.manual_seed(0)
    plain = language_model()
    sample = rows()["input_ids"][: max(1, 16 // options.chunks)]

    def pipelined() -> PipelinedLlamaForCausalLM:
        model = PipelinedLlamaForCausalLM(copy.deepcopy(plain.config))
        model.load_state_dict(plain.state_dict())
        return model.spread(sample, chunks=options.chunks)

    models = [pipelined(), pipelined(), plain]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        through = trainer(models[0], one, options)
        through.train()
        again = trainer(models[1], one, options)  # From what is saved after the first epoch.
        steps = through.state.global_step // options.epochs
        again.train(resume_from_checkpoint=f"{one}/checkpoint-{steps}")
        reference = trainer(plain, two, options)
        reference.train()
        through.save_model(one)
        loaded = LlamaForCausalLM.from_pretrained(one)
    print(f"\npartitions of {models[0].pipe.balance} on {[*map(str, models[0].pipe.devices)]}")

    found = [losses(x) for x in (through, again, reference)]
    print(f"{'epoch':>5}  {'GPipe':>9}  {'restarted':>9}  {'plain':>9}")
    for k, values in enumerate(zip(*found)):
        print(f"{k + 1:5}  {values[0]:9.6f}  {values[1]:9.6f}  {values[2]:9.6f}")
    gap = max(abs(x - values[-1]) for values in zip(*found) for x in values)
    weights = [x.cpu() for x in models[0].state_dict().values()]
    saved = all(map(torch.equal, weights, loaded.state_dict().values()))
    bound = 1e-3 if options.precision == "no" else 0.1
    if gap < bound and saved and found[0][-1] < found[0][0]:
        print(f"\nAll learnt the same: mean losses within {gap:.1e}. from_pretrained() loads it.")
        return 0
    print(f"\nNot as it should be: losses differ by {gap:.1e}, or do not fall, or are not saved.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
