"""Train one model in several processes, each of which runs it under GPipe on its own devices.

DistributedDataParallel goes around GPipe: process r has a copy of the model over the accelerators
r * n to r * n + n - 1 of its machine (or on the CPU, if there are too few), takes its part of each
batch, and gets the mean of all gradients. The plain model, without GPipe and
DistributedDataParallel, sees the whole batches, so gradients and losses have to be equal, up to
rounding. Gradients of several batches are accumulated without communication, and the plain model
loads what the first process saves.

    torchrun --nproc-per-node 2 -m examples.data_parallel
    torchrun --nproc-per-node 2 -m examples.data_parallel --checkpoint always --accumulate 4
    python -m examples.data_parallel

This example needs nothing but torch and torchgpipe.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from examples.options import CHECKPOINT, at_least
from torchgpipe import GPipe

PARTITIONS = 2
BATCH = 64


def layers(width: int = 32) -> nn.Sequential:
    """The model, in double precision since its gradients are compared."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(nn.Linear(2, width), *hidden, nn.Linear(width, 3)).double()


def spirals(rows: int) -> TensorDataset:
    """Points of three spirals in the plane, and the spiral of each point."""
    spiral = torch.arange(rows) % 3
    radius = torch.rand(rows, dtype=torch.double)
    angle = 2 * math.pi * (radius + spiral / 3) + torch.randn(rows) / 10
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(4 * points, spiral)


def places() -> list[torch.device]:
    """The devices of this process, one for each partition."""
    process = int(os.environ.get("LOCAL_RANK", 0))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or torch.accelerator.device_count() < processes * PARTITIONS:
        return [torch.device("cpu")] * PARTITIONS
    first = process * PARTITIONS
    torch.accelerator.set_device_index(first)
    return [torch.device(accelerator.type, first + j) for j in range(PARTITIONS)]


def join_others(device: torch.device) -> None:
    """Start the communication with the other processes, by the backends for the CPU and the device.

    The CPU's is for what is small, which a pipeline over processes tells the others.
    """
    own = distributed.get_default_backend_for_device(device)
    backend = own if device.type == "cpu" else f"cpu:gloo,{device.type}:{own}"
    if "RANK" in os.environ:
        distributed.init_process_group(backend)  # torchrun has set the rest
    else:
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Sequence[Tensor]]
) -> Tensor:
    """Make a training step on several batches of this process; return their mean loss."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=torch.double)
    for k, (points, spiral) in enumerate(batches, start=1):
        waits = isinstance(model, DistributedDataParallel) and k < len(batches)
        # Gradients are exchanged in the last backward alone.
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]  # It has no_sync.
            output = model(points)
            loss = F.cross_entropy(output, spiral.to(output.device)) / len(batches)
            loss.backward()
        total += loss.detach().cpu()
    optimizer.step()
    return total


def loader(data: TensorDataset, processes: int, process: int) -> DataLoader[list[Tensor]]:
    """A process's part of the batches, which are the same for any number of processes."""
    sampler = DistributedSampler(data, processes, process, seed=0)
    return DataLoader(data, BATCH // processes, sampler=sampler, drop_last=True)


def saved(model: DistributedDataParallel) -> nn.Sequential:
    """The plain model, which loads the weights of the trained one from a file."""
    plain = layers()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.module.state_dict(), f"{folder}/model.pt")
        plain.load_state_dict(torch.load(f"{folder}/model.pt", map_location="cpu"))
    return plain


def differ(ones: Iterable[Tensor | None], others: Iterable[Tensor | None]) -> float:
    """The largest difference between tensors."""
    pairs = ((a.cpu(), b.cpu()) for a, b in zip(ones, others) if a is not None and b is not None)
    return max((a - b).abs().max().item() for a, b in pairs)


def train(options: argparse.Namespace, devices: list[torch.device]) -> tuple[float, list[float]]:
    """Train both models; return the largest difference, and the loss of each epoch."""
    process, processes = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    data = spirals(options.rows)
    module = layers()
    plain = copy.deepcopy(module).to(devices[0])
    model = DistributedDataParallel(  # without device_ids, since the model has several devices
        GPipe(module, [3, 3], devices=devices, chunks=4, checkpoint=options.checkpoint)
    )
    optimizers = [torch.optim.AdamW(m.parameters(), options.lr) for m in (model, plain)]
    loaders = [loader(data, processes, process), loader(data, 1, 0)]
    say = print if process == 0 else lambda *_: None
    say(f"processes: {processes}, devices of the first: {', '.join(map(str, devices))}")
    say(f"{'epoch':>5}  {'DDP(GPipe)':>10}  {'plain':>9}  {'gradients differ by':>19}")

    largest, losses = 0.0, []
    for epoch in range(options.epochs):
        totals = torch.zeros(2, dtype=torch.double)
        for each in loaders:
            each.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # A DistributedSampler.
        batches = [[[x.to(devices[0]) for x in batch] for batch in each] for each in loaders]
        starts = range(0, len(batches[0]), options.accumulate)
        for start in starts:
            now = slice(start, start + options.accumulate)
            trained = zip((model, plain), optimizers, batches)
            totals += torch.stack([step(m, optimizer, b[now]) for m, optimizer, b in trained])
            gradients = ([x.grad for x in m.parameters()] for m in (model, plain))
            largest = max(largest, differ(*gradients))
        means = (totals / len(starts)).to(devices[0])
        distributed.all_reduce(means)  # each process has had its own part of the batches
        loss, reference = (means / processes).tolist()
        losses.append(loss)
        if epoch % -(-options.epochs // 6) == 0 or epoch + 1 == options.epochs:
            say(f"{epoch + 1:5}  {loss:10.6f}  {reference:9.6f}  {largest:19.1e}")
    if process == 0:  # the others have the same
        largest = max(largest, differ(saved(model).parameters(), plain.parameters()))
    return largest, losses


def main(arguments: list[str] | None = None) -> int:
    """Train the model; return 0 if it trained as the plain one does on whole batches."""
    parser = argparse.ArgumentParser(description="DistributedDataParallel around GPipe.")
    parser.add_argument("--epochs", type=at_least(1), default=30)
    parser.add_argument("--rows", type=at_least(BATCH), default=768)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--accumulate", type=at_least(1), default=2, help="batches of a step")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    devices = places()
    join_others(devices[0])
    try:
        largest, losses = train(options, devices)
        distributed.barrier()  # its threads must not hold the last tensors when Python ends
    finally:
        distributed.destroy_process_group()
    if largest < 1e-8 and losses[-1] < losses[0] / 2:
        return 0
    print(
        f"Not as it should be: gradients or weights differ by {largest:.1e}, or the loss has not "
    )
    print(f"fallen to half ({losses[0]:.4f} at first, {losses[-1]:.4f} at last).")
    return 1


if __name__ == "__main__":
    sys.exit(main())
