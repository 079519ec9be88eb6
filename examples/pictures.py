"""The timeline of a training step under three schedules, in the terminal and as an SVG.

A Transformer of eight blocks trains on four virtual accelerators under GPipe's schedule, 1F1B and
ZB-V, with one table of costs: a matrix product takes 1 ms, forward and backward, and nothing else
takes any. So the pictures differ by the order of the work alone, and not by what else the machine
does. Without a C++ compiler, or with accelerators of its own, the machine measures a step of GPipe
instead::

    python -m examples.pictures
    python -m examples.pictures --folder pictures --chunks 16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.nn import functional as F

from examples import schedules
from examples.options import at_least
from examples.places import places
from torchgpipe import GPipe, Timeline, trace
from torchgpipe.testing import UnavailableError, load

SCHEDULES = {"GPipe": "fill_drain", "1F1B": "1f1b", "ZB-V": "zero_bubble_v"}

LEGEND = """Time goes from left to right. A row is a device, a dot is a wait, which is the bubble.
F3 is the forward of micro-batch 3, and B3 its backward. ZB-V splits backward into I, for the input,
and W, for the weights, which fills the bubble; each device has two stages there."""


def measured(chunks: int) -> Timeline:
    """A step of GPipe on devices of this machine, after one to warm up."""
    devices = places(schedules.WORKERS)
    balance = [schedules.BLOCKS // len(devices)] * len(devices)
    model = GPipe(schedules.blocks(), balance, devices=devices, chunks=chunks, checkpoint="never")
    x, y = schedules.samples(chunks)
    x, y = x.to(devices[0]), y.to(devices[-1])
    F.mse_loss(model(x), y).backward()
    with trace(model) as timeline:
        F.mse_loss(model(x), y).backward()
    return timeline


def main(arguments: list[str] | None = None) -> int:
    """Draw the timelines; return 0."""
    parser = argparse.ArgumentParser(description="Timelines of a training step.")
    parser.add_argument("--folder", type=Path, default=Path("pictures"), help="of the SVG")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "schedules.svg"
    try:
        # Before the first backward of the process.
        load(schedules.WORKERS)
    except UnavailableError as error:
        step = measured(options.chunks)
        print(step)
        step.svg(file)
        reason = str(error).splitlines()[0]
        print(f"\n{file} is the same. Schedules side by side need virtual accelerators: {reason}")
        return 0
    print(f"A step of {options.chunks} micro-batches on {schedules.WORKERS} virtual accelerators.")
    print(f"{LEGEND}\n")
    timelines, lines = [], []
    for title, name in SCHEDULES.items():
        batch = schedules.samples(options.chunks)
        step = schedules.step(name, schedules.blocks(), batch, options.chunks, "never")
        timeline = step.seen.timeline
        timeline.title = title
        timelines.append(timeline)
        lines.append(f"{title:8} {step.seen.makespan:5.0f} {step.bubble:7.1%} {step.mib:9.2f}")
        print(f"{title}: {timeline}\n")
    print("schedule    ms  bubble  peak MiB", *lines, sep="\n")
    first, *others = timelines
    first.svg(file, *others)
    print(f"\n{file} has all three on one scale, in colors.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
