"""Fine-tune a causal language model of Transformers over several devices, and save it.

Any causal model of Transformers will do: a folder, or a name on the hub. Without one, a tiny Llama
over bytes learns from the README. All its weights are trained, or adapters alone (LoRA). The blocks
are spread over all accelerators by their measured times; without an accelerator all of it is on the
CPU. At the end come a timeline of a step, and a folder that from_pretrained() loads::

    pip install accelerate transformers peft
    python -m examples.finetune
    python -m examples.finetune --model meta-llama/Llama-3.2-1B --text notes.txt --lora 8 --packed
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import torchgpipe
from examples.language_model import README, language_model
from examples.options import CHECKPOINT, at_least
from torchgpipe.transformers import pipelined


def rows_of(texts: list[list[int]], length: int, packed: bool) -> list[dict[str, Tensor]]:
    """Rows of at most so many tokens.

    Args:
        texts: the tokens of each line of a text.
        length: the number of tokens in a row.
        packed: whether lines are put one after another, so that no row needs padding.
    """
    if packed:
        tokens = [token for ids in texts for token in ids]
        texts = [tokens[k : k + length] for k in range(0, len(tokens) - length + 1, length)]
    return [{"input_ids": torch.tensor(ids[:length])} for ids in texts]


def collated(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A mini-batch: rows that are padded at the end, where labels count nowhere."""
    ids = [row["input_ids"] for row in rows]
    mask = pad_sequence([torch.ones_like(x) for x in ids], batch_first=True)
    labels = pad_sequence(ids, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask, "labels": labels}


def main(arguments: list[str] | None = None) -> int:
    """Train, and return 0 if the loss falls and the saved model is the trained one."""
    parser = argparse.ArgumentParser(description="Fine-tune a causal language model.")
    parser.add_argument("--model", help="a folder, or a name on the hub")
    parser.add_argument("--text", type=Path, default=README, help="a file with a row in each line")
    parser.add_argument("--out", type=Path, help="the folder to save to")
    parser.add_argument("--lora", type=at_least(0), default=0, help="the rank of adapters")
    parser.add_argument("--packed", action="store_true", help="rows without padding")
    parser.add_argument("--length", type=at_least(2), default=64, help="tokens in a row")
    parser.add_argument("--rows", type=at_least(1), default=16, help="rows of a mini-batch")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--steps", type=at_least(2), default=20)
    parser.add_argument("--rate", type=float, default=0.003, help="the learning rate")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.model is None:
        model = language_model(tie_word_embeddings=False)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=options.lora))
    lines = [x for x in options.text.read_text("utf-8").splitlines() if x.strip()]
    if options.model is None:
        texts = [[*line.encode(), 1] for line in lines]
    else:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        texts = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(lines)["input_ids"]]
    data = rows_of(texts, options.length, options.packed)
    folder = options.out or Path(tempfile.mkdtemp())
    settings = TrainingArguments(
        str(folder),
        per_device_train_batch_size=options.rows,
        max_steps=options.steps,
        learning_rate=options.rate,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
    )
    trainer = pipelined(Trainer)(
        model,
        settings,
        train_dataset=data,
        data_collator=collated,
        devices=None if torch.accelerator.is_available() else ["cpu"],
        chunks=options.chunks,
        checkpoint=options.checkpoint,
    )
    trainer.train()
    pipe = trainer.pipe
    batch = {key: x.to(settings.device) for key, x in collated(data[: options.rows]).items()}
    with torchgpipe.trace(pipe) as timeline:
        pipe(**batch).loss.mean().backward()
    print(pipe.describe(), timeline, sep="\n")

    trainer.save_model(str(folder))
    saved = {name: x.cpu() for name, x in model.state_dict().items()}
    if options.lora:
        # The base model was not saved with the adapters.
        from safetensors.torch import load_file

        files = load_file(folder / "adapter_model.safetensors")
        whole = {name.replace(".default.", "."): x for name, x in saved.items()}
    else:
        files = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        whole = saved
    same = all(torch.equal(x, whole[name]) for name, x in files.items())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"\nThe loss fell from {losses[0]:.3f} to {losses[-1]:.3f}. Saved to {folder}.")
    return 0 if same and losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
