"""A Transformer under GPipe, 1F1B and zero bubbles: the time and the memory of a step.

Four virtual accelerators take the time of its matrix products, and count its memory. The model is
the same each time, and so are its gradients. The schedules with two stages on each device cut it
into eight stages of half the size::

    python -m examples.schedules
    python -m examples.schedules --chunks 32 --checkpoint except_last
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import CHECKPOINT, at_least
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import Costs, named, simulate
from torchgpipe.testing import Observation, load, observe

WORKERS, BLOCKS, WIDTH, TOKENS = 4, 8, 32, 64

#: Schedules with one stage on each device, with two in a loop, and with two in a V.
PLACES = {
    "fill_drain": [0, 1, 2, 3],
    "1f1b": [0, 1, 2, 3],
    "zero_bubble_h1": [0, 1, 2, 3],
    "interleaved": [0, 1, 2, 3] * 2,
    "zero_bubble_v": [0, 1, 2, 3, 3, 2, 1, 0],
    "dualpipe_v": [0, 1, 2, 3, 3, 2, 1, 0],
}


def blocks() -> nn.Sequential:
    """Blocks of the same cost."""
    torch.manual_seed(0)
    options = {"dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
    return nn.Sequential(
        *[nn.TransformerEncoderLayer(WIDTH, 4, **options) for _ in range(BLOCKS)]  # type: ignore[arg-type]
    )


def samples(chunks: int) -> tuple[Tensor, Tensor]:
    """An input and a target, of two rows for each micro-batch."""
    rows = 2 * chunks
    return torch.rand(rows, TOKENS, WIDTH), torch.rand(rows, TOKENS, WIDTH)


class Step(NamedTuple):
    """A step on virtual accelerators."""

    seen: Observation
    """All that they did, with its virtual time."""
    bubble: float
    """The longest time in which one of them computes nothing, as a share of the step."""
    mib: float
    """The most memory that one of them holds beyond the weights."""


def step(
    name: str,
    layers: nn.Sequential,
    batch: tuple[Tensor, Tensor],
    chunks: int,
    checkpoint: str,
) -> Step:
    """Run a step under a schedule."""
    devices = load(WORKERS)
    places = [devices[w] for w in PLACES[name]]
    balance = [BLOCKS // len(places)] * len(places)
    model = GPipe(layers, balance, devices=places, chunks=chunks, checkpoint=checkpoint)
    training = ScheduledLoss(model, F.mse_loss, name)
    input, target = (x.to(places[k]) for k, x in zip((0, -1), batch))
    # The input needs a gradient, as that of an embedding before it would.
    input.requires_grad_()
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    before = [torch.accelerator.memory_allocated(device) for device in devices]
    # Each matrix product takes the same time, forward and backward.
    with observe(costs={"addmm": 1.0, "mm": 1.0}) as seen:
        loss = training(input, target)
    assert not seen.races
    peaks = [torch.accelerator.max_memory_allocated(device) for device in devices]
    memory = max(peak - old for peak, old in zip(peaks, before)) / 2**20
    loss.backward()
    return Step(seen, max(share.bubble for share in seen.timeline.shares), memory)


def simulated(name: str, chunks: int) -> float:
    """The bubble of a schedule as a share, where F, I and W take the same time."""
    stages = len(PLACES[name])
    share = WORKERS / stages
    # Two streams of a virtual device do not slow each other down.
    costs = Costs(F=share, I=share, W=share, overlap=max)
    report = simulate(named(name, WORKERS, chunks), costs)
    return float(max(report.bubble) / report.makespan)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each schedule; return 0 if all gradients are equal."""
    parser = argparse.ArgumentParser(description="Schedules for a Transformer.")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="never")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Before the first backward of the process.
    load(WORKERS)
    batch = samples(options.chunks)
    plain = blocks()
    F.mse_loss(plain(batch[0]), batch[1]).backward()
    equal = True
    print("schedule          ms  bubble  simulated    MiB")
    for name in PLACES:
        layers = copy.deepcopy(blocks())
        seen, bubble, memory = step(name, layers, batch, options.chunks, options.checkpoint)
        known = f"{simulated(name, options.chunks):9.1%}" if options.checkpoint == "never" else ""
        print(f"{name:14} {seen.makespan:5.0f} {bubble:7.1%}  {known:9} {memory:6.1f}")
        for own, other in zip(layers.parameters(), plain.parameters()):
            assert own.grad is not None
            assert other.grad is not None
            equal &= torch.allclose(own.grad.cpu(), other.grad, rtol=1e-3, atol=1e-6)
    print("All gradients are equal" if equal else "Not as it should be")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
