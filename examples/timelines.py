"""Timelines of a Transformer on four virtual accelerators: GPipe, 1F1B and zero bubbles in a V.

The devices take the time that the CPU needs for each operator, so a model of your own has such
timelines, too. The table shows what each schedule takes, and the picture all of them on one scale::

    python -m examples.timelines
    python -m examples.timelines --chunks 16 --folder pictures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import at_least
from torchgpipe import GPipe, ScheduledLoss, Timeline, trace
from torchgpipe.testing import UnavailableError, load, observe

WORKERS, BLOCKS, WIDTH, TOKENS = 4, 8, 64, 64

#: The steps, of which the fastest one is shown.
STEPS = 5

#: The devices of the stages under each schedule; None is the order of GPipe itself.
SCHEDULES: dict[str, tuple[str | None, list[int]]] = {
    "GPipe": (None, [0, 1, 2, 3]),
    "1F1B": ("1f1b", [0, 1, 2, 3]),
    "ZB-V": ("zbv", [0, 1, 2, 3, 3, 2, 1, 0]),
}


class Outcome(NamedTuple):
    """A step under a schedule: its timeline, and the most MiB of a device."""

    timeline: Timeline
    memory: float


def blocks() -> nn.Sequential:
    """Blocks of the same cost."""
    torch.manual_seed(0)
    layers = nn.Sequential()
    for _ in range(BLOCKS):
        layers.append(
            nn.TransformerEncoderLayer(
                WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
        )
    return layers


def run(
    title: str, devices: list[torch.device], batch: tuple[Tensor, Tensor], chunks: int
) -> Outcome:
    """Trace steps under a schedule, behind another one that makes streams and gradients."""
    name, places = SCHEDULES[title]
    balance = [BLOCKS // len(places)] * len(places)
    model = GPipe(
        blocks(), balance, devices=[devices[w] for w in places], chunks=chunks, checkpoint="never"
    )
    training = None if name is None else ScheduledLoss(model, F.mse_loss, name)
    input, target = batch[0].to(model.devices[0]), batch[1].to(model.devices[-1])
    # As behind an embedding, the first blocks have a gradient of their input to compute.
    input.requires_grad_()

    def step() -> None:
        loss = F.mse_loss(model(input), target) if training is None else training(input, target)
        loss.backward()

    step()
    with observe(costs="measured") as seen, trace(training or model) as timeline:
        for _ in range(STEPS):
            step()
    assert not seen.races
    # Noise only adds time.
    best = min((timeline.step(k) for k in range(STEPS)), key=lambda x: x.makespan)
    best.title = title
    return Outcome(best, max(timeline.memory.values()) / 2**20)


def compare(folder: Path, chunks: int) -> None:
    """Print a table of the schedules, and draw their timelines on one scale."""
    # Before the first backward of the process.
    devices = load(WORKERS)
    batch = torch.rand(2 * chunks, TOKENS, WIDTH), torch.rand(2 * chunks, TOKENS, WIDTH)
    found = {title: run(title, devices, batch, chunks) for title in SCHEDULES}
    print(f"{BLOCKS} blocks on {WORKERS} virtual accelerators, {chunks} micro-batches")
    print("schedule      ms  bubble     MiB")
    for title, (timeline, memory) in found.items():
        bubble = sum(x.bubble for x in timeline.shares) / WORKERS
        print(f"{title:8} {timeline.makespan:7.2f} {bubble:7.1%} {memory:7.1f}")
    first, *others = [x.timeline for x in found.values()]
    first.svg(folder / "schedules.svg", *others)
    print(f"their timelines: {folder / 'schedules.svg'}")


def main(arguments: list[str] | None = None) -> int:
    """Compare the schedules, or say why that is impossible here; return 0 either way."""
    parser = argparse.ArgumentParser(description="Timelines of a Transformer.")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="of the pictures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        compare(options.folder, options.chunks)
    except UnavailableError as error:
        print(f"no timelines of schedules: {' '.join(str(error).split())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
