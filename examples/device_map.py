"""A decoder of Hugging Face Transformers by a device map, on four virtual accelerators.

A Llama learns to spell from the lines of the README. The same step is done in four ways, and takes
the virtual time of its matrix products: under Accelerate's device map with the whole mini-batch,
the same with one micro-batch after another, under MappedGPipe with the same map, and under GPipe
with the layers in an nn.Sequential that was written by hand::

    pip install accelerate transformers
    python -m examples.device_map
    python -m examples.device_map --chunks 16 --checkpoint except_last
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn

from examples.language_model import language_model, loss_of, rows, sequential
from examples.options import CHECKPOINT, at_least
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.testing import load, observe

DEVICES, BLOCKS, ROWS = 4, 8, 32

#: Milliseconds of a matrix product with a micro-batch.
COSTS = {"mm": 1.0, "addmm": 1.0, "bmm": 0.5}


def device_map(devices: list[torch.device]) -> dict[str, torch.device]:
    """Two blocks on each device; the embedding on the first, norm and head on the last one."""
    found = {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    for k in range(BLOCKS):
        found[f"model.layers.{k}"] = devices[k * len(devices) // BLOCKS]
    return {**found, "model.norm": devices[-1], "lm_head": devices[-1]}


def subject() -> tuple[Any, dict[str, Tensor]]:
    """The decoder, with random weights, and a mini-batch of lines."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": BLOCKS}
    model = language_model(**sizes, tie_word_embeddings=False)
    return model, {key: x[:ROWS] for key, x in rows().items()}


def steps(
    model: Any, batch: dict[str, Tensor], devices: list[torch.device], options: argparse.Namespace
) -> dict[str, tuple[nn.Module, Callable[[], Tensor]]]:
    """The ways to compute the loss of a mini-batch, each with its own copy of the model."""
    places = device_map(devices)
    batch = {key: x.to(devices[0]) for key, x in batch.items()}
    labels = batch["labels"]
    # Each micro-batch divides the sum of its losses by this number, so that all tokens count alike.
    count = (labels[:, 1:] != -100).sum()
    plain = dispatch_model(copy.deepcopy(model), places, main_device=devices[0])
    mapped = MappedGPipe(
        copy.deepcopy(model), places, chunks=options.chunks, checkpoint=options.checkpoint
    )
    share = BLOCKS // DEVICES
    by_hand = GPipe(
        sequential(copy.deepcopy(model)),
        [share + 1, *[share] * (DEVICES - 2), share + 1],
        devices=devices,
        chunks=options.chunks,
        checkpoint=options.checkpoint,
    )

    def loop() -> Tensor:
        parts = zip(*[x.chunk(options.chunks) for x in batch.values()])
        inputs = [dict(zip(batch, part)) for part in parts]
        losses = [plain(**x, num_items_in_batch=count).loss for x in inputs]
        return torch.stack(losses).sum()

    def whole() -> Tensor:
        loss: Tensor = plain(**batch).loss
        return loss

    def by_map() -> Tensor:
        losses: Tensor = mapped(**batch, num_items_in_batch=count).loss
        return losses.sum()

    def in_sequence() -> Tensor:
        return loss_of(by_hand(batch["input_ids"], batch["attention_mask"]), labels)

    return {
        "device map": (plain, whole),
        "device map, in a loop": (plain, loop),
        "MappedGPipe": (mapped, by_map),
        "GPipe, by hand": (by_hand, in_sequence),
    }


def timed(name: str, step: Callable[[], Tensor], chunks: int) -> tuple[float, Tensor]:
    """The virtual milliseconds of a forward and a backward, and the loss."""
    # Without micro-batches a product has the rows of all of them.
    times = chunks if name == "device map" else 1
    with observe(costs={key: times * cost for key, cost in COSTS.items()}) as seen:
        loss = step()
        loss.backward()
    return seen.makespan, loss


def main(arguments: list[str] | None = None) -> int:
    """Print the time of a step in each way; return 0 if all gradients are equal."""
    parser = argparse.ArgumentParser(description="A decoder by a device map.")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="never")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    devices = load(DEVICES)
    model, batch = subject()
    loss = model(**batch).loss
    loss.backward()
    expected = [x.grad for x in model.parameters()]
    model.zero_grad()
    equal = True
    print(f"{'':21}     ms    loss")
    for name, (wrapped, step) in steps(model, batch, devices, options).items():
        wrapped.zero_grad()
        time, found = timed(name, step, options.chunks)
        print(f"{name:21} {time:6.0f}  {found.item():.4f}")
        for own, other in zip(wrapped.parameters(), expected):
            assert own.grad is not None
            assert other is not None
            equal &= torch.allclose(own.grad.cpu(), other, rtol=1e-3, atol=1e-5)
    print("All gradients are equal" if equal else "Not as it should be")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
