"""Train one model over several processes, each of which has some of its layers.

Process r computes its stages on accelerator r of its machine, or on the CPU if there are too few.
The same model is then trained in one process, by the same schedule, under ScheduledLoss. It starts
from the same weights, sees the same mini-batches, the last of which have fewer rows, and draws the
same random numbers for dropout. So losses and weights have to be equal: bit by bit where all
forwards come before all backwards, and up to rounding under other schedules.

    torchrun --nproc-per-node 2 -m examples.across_processes
    torchrun --nproc-per-node 2 -m examples.across_processes --schedule zbv --checkpoint always
    python -m examples.across_processes

This example needs nothing but torch, 2.13 or newer, and torchgpipe.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from examples.data_parallel import differ, join_others, spirals
from examples.options import CHECKPOINT, at_least
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.distributed import Pipe
from torchgpipe.schedule import named

BATCH = 60


def layers(width: int = 32) -> nn.Sequential:
    """The model, in double precision since its weights are compared."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(nn.Linear(2, width), *hidden, nn.Linear(width, 3)).double()


def place() -> torch.device:
    """The device of this process."""
    process = int(os.environ.get("LOCAL_RANK", 0))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < processes:
        return torch.device("cpu")
    torch.accelerator.set_device_index(process)
    return torch.device(accelerator.type, process)


def balance_of(schedule: str, processes: int, chunks: int, count: int) -> list[int]:
    """A balance for as many stages as the schedule has, the later ones a layer larger."""
    stages = len(named(schedule, processes, chunks).placement)
    return [(j + 1) * count // stages - j * count // stages for j in range(stages)]


def train(
    parameters: Iterable[Tensor],
    step: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[Sequence[Tensor]],
    lr: float,
) -> Tensor:
    """Make a training step on each mini-batch; return the losses."""
    torch.manual_seed(1)  # of dropout
    optimizer = torch.optim.AdamW(parameters, lr)
    losses = []
    for points, spiral in batches:
        optimizer.zero_grad()
        losses.append(step(points, spiral).detach().cpu())
        optimizer.step()
    return torch.stack(losses)


def over_processes(
    module: nn.Sequential,
    balance: list[int],
    batches: Sequence[Sequence[Tensor]],
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train the layers of this process; return the losses, and the weights of all processes."""
    model = Pipe(
        module,
        balance,
        loss=F.cross_entropy,
        schedule=options.schedule,
        chunks=options.chunks,
        checkpoint=options.checkpoint,
        device=device,
    )
    losses = train(model.parameters(), model.step, batches, options.lr)
    own = {key: x.cpu() for key, x in model.state_dict().items()}
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return losses, {key: x for each in found for key, x in each.items()}


def in_one_process(
    module: nn.Sequential,
    balance: list[int],
    batches: Sequence[Sequence[Tensor]],
    device: torch.device,
    options: argparse.Namespace,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train all layers on one device; return the losses and the weights."""
    model = GPipe(
        module,
        balance,
        devices=[device] * len(balance),
        chunks=options.chunks,
        checkpoint=options.checkpoint,
    )
    training = ScheduledLoss(model, F.cross_entropy, options.schedule)

    def step(points: Tensor, spiral: Tensor) -> Tensor:
        loss: Tensor = training(points, spiral)
        loss.backward()
        return loss

    losses = train(model.parameters(), step, batches, options.lr)
    return losses, model.module.state_dict()


def main(arguments: list[str] | None = None) -> int:
    """Train the model; return 0 if it trained as in one process."""
    parser = argparse.ArgumentParser(description="A pipeline over several processes.")
    parser.add_argument("--epochs", type=at_least(1), default=12)
    parser.add_argument("--rows", type=at_least(1), default=280)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--schedule", default="1f1b", help="the name of a built-in schedule")
    parser.add_argument("--chunks", type=at_least(1), default=8, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module, data = layers(), spirals(options.rows)
    device = place()
    orders = [torch.randperm(options.rows) for _ in range(options.epochs)]
    batches = [
        [x[rows].to(device) for x in data.tensors]
        for order in orders
        for rows in order.split(BATCH)
    ]
    join_others(device)
    try:
        process, processes = distributed.get_rank(), distributed.get_world_size()
        balance = balance_of(options.schedule, processes, options.chunks, len(module))
        given = batches, device, options
        found, weights = over_processes(copy.deepcopy(module), balance, *given)
        if process > 0:
            distributed.barrier()
            return 0
        losses, expected = in_one_process(module, balance, *given)
        distributed.barrier()  # its threads must not hold the last tensors when Python ends
    finally:
        distributed.destroy_process_group()

    print(f"processes: {processes}, layers of the stages: {balance}, schedule: {options.schedule}")
    print(f"{'epoch':>5}  {'Pipe':>9}  {'one process':>11}  {'losses differ by':>16}")
    pairs = torch.stack([found, losses]).view(2, options.epochs, -1)
    for epoch, (own, other) in enumerate(pairs.unbind(1), start=1):
        if epoch == options.epochs or epoch % -(-options.epochs // 6) == 1:
            largest = differ([own], [other])
            print(f"{epoch:5}  {own.mean():9.6f}  {other.mean():11.6f}  {largest:16.1e}")
    between = differ(weights.values(), [expected[key] for key in weights])
    print(f"weights differ by {between:.1e}")
    largest = max(between, differ([found], [losses]))
    means = pairs[0].mean(1)
    equal = largest == 0 if options.schedule == "fill_drain" else largest < 1e-6
    if weights.keys() == expected.keys() and equal and means[-1] < means[0] * 3 / 4:
        return 0
    print(f"Not as it should be: losses or weights differ by {largest:.1e}, or the loss has not")
    print(f"fallen by a quarter ({means[0]:.4f} at first, {means[-1]:.4f} at last).")
    return 1


if __name__ == "__main__":
    sys.exit(main())
