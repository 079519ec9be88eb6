"""The timeline of a training step, as a picture in the terminal and as an SVG.

The first one is measured on the accelerators of this machine, or on its CPU, whose backward runs
on one thread. Where there is a C++ compiler, the same model then runs on four virtual accelerators,
under GPipe's schedule, 1F1B and ZB-V. Each operator takes as long there as the CPU takes for it::

    python -m examples.pictures
    python -m examples.pictures --folder pictures --chunks 16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.options import at_least
from examples.places import places
from examples.schedules import BLOCKS, PLACES, WORKERS, blocks, samples
from torchgpipe import GPipe, ScheduledLoss, Timeline, trace
from torchgpipe.testing import UnavailableError, load, observe

SCHEDULES = {"GPipe": "fill_drain", "1F1B": "1f1b", "ZB-V": "zero_bubble_v"}


#: The steps on virtual accelerators, of which the fastest one is drawn.
STEPS = 5


def traced(step: Callable[[], Tensor], model: torch.nn.Module, steps: int = 1) -> Timeline:
    """The timeline of some steps, after one to warm up."""
    step().backward()
    with trace(model) as timeline:
        for _ in range(steps):
            step().backward()
    return timeline


def measured(chunks: int, devices: list[torch.device]) -> Timeline:
    """A step of GPipe on devices of this machine."""
    balance = [BLOCKS // WORKERS] * WORKERS
    model = GPipe(blocks(), balance, devices=devices, chunks=chunks, checkpoint="never")
    x, y = samples(chunks)
    x, y = x.to(devices[0]), y.to(devices[-1])
    return traced(lambda: F.mse_loss(model(x), y), model)


def virtual(name: str, chunks: int, devices: list[torch.device]) -> Timeline:
    """A step of a schedule on virtual accelerators."""
    own = [devices[w] for w in PLACES[name]]
    balance = [BLOCKS // len(own)] * len(own)
    model = GPipe(blocks(), balance, devices=own, chunks=chunks, checkpoint="never")
    training = ScheduledLoss(model, F.mse_loss, name)
    x, y = samples(chunks)
    x, y = x.to(own[0]), y.to(own[-1])
    with observe(costs="measured"):
        timeline = traced(lambda: training(x, y), training, STEPS)
    # Noise only adds time.
    return min(map(timeline.step, range(STEPS)), key=lambda step: step.makespan)


def main(arguments: list[str] | None = None) -> int:
    """Draw all timelines; return 0."""
    parser = argparse.ArgumentParser(description="Timelines of a training step.")
    parser.add_argument("--folder", type=Path, default=Path("pictures"), help="of the SVGs")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    reason = ""
    try:
        # Before the first backward of the process.
        devices = load(WORKERS)
        own = [torch.device("cpu")] * WORKERS
    except UnavailableError as error:
        own, reason = places(WORKERS), str(error).splitlines()[0]
    step = measured(options.chunks, own)
    print(step)
    step.svg(options.folder / "step.svg")
    print(f"\n{options.folder / 'step.svg'} is the same step as a picture.")
    if reason:
        print(f"\nThe schedules need virtual accelerators: {reason}")
        return 0
    timelines = {name: virtual(x, options.chunks, devices) for name, x in SCHEDULES.items()}
    print(f"\nOn {WORKERS} virtual accelerators, where an operator takes as long as on this CPU:\n")
    print("schedule     ms  bubble  peak MiB")
    for name, timeline in timelines.items():
        timeline.title = name
        last = timeline.step()
        bubble = sum(x.bubble for x in last.shares) / len(last.shares)
        peak = max(timeline.memory.values()) / 2**20
        print(f"{name:8} {last.makespan:6.1f} {bubble:7.1%} {peak:9.2f}")
    first, *others = timelines.values()
    first.svg(options.folder / "schedules.svg", *others)
    print(f"\n{options.folder / 'schedules.svg'} has all three on one scale.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
