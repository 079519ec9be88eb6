"""Train, save, stop, and go on in another balance as if the training had never stopped.

The files say nothing of the balance: weights have the names of the plain nn.Sequential, which is
model.module, and an optimizer knows parameters by their order, which is the order of the layers. So
each loss after the stop is, bit for bit, the same as in a training without a stop, with dropout,
batch normalisation, AdamW, a schedule and a GradScaler. There are three ways to save: one file of
torch.save, a file of safetensors for each partition, and torch.distributed.checkpoint.

    pip install safetensors
    python -m examples.saving
    python -m examples.saving --epochs 8 --chunks 8
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

from examples.options import at_least
from examples.places import places
from torchgpipe import GPipe


class Training:
    """The model, the optimizer, the schedule, the scaler and the epoch of a training."""

    def __init__(self, balance: list[int], options: argparse.Namespace, seed: int) -> None:
        torch.manual_seed(seed)
        devices = places(len(balance))
        self.model = GPipe(layers(), balance, devices=devices, chunks=options.chunks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.epochs)
        self.scaler = torch.amp.GradScaler(devices[-1].type, growth_interval=10)
        self.epoch = 0

    def rest(self) -> dict[str, Any]:
        """The state that has to be saved besides the weights and the optimizer."""
        # Dropout draws the numbers of the first device's generator, whatever device it is on.
        device = self.model.devices[0]
        own = () if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return {
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
            "generators": [torch.get_rng_state(), own],
        }

    def load_rest(self, rest: dict[str, Any]) -> None:
        """Load what :meth:`rest` returned."""
        self.schedule.load_state_dict(rest["schedule"])
        self.scaler.load_state_dict(rest["scaler"])
        self.epoch = rest["epoch"]
        device, (cpu, own) = self.model.devices[0], rest["generators"]
        torch.set_rng_state(cpu)
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(own, device)

    def run(self, until: int, x: Tensor, y: Tensor) -> list[float]:
        """Train until an epoch; return the loss of every step."""
        losses = []
        while self.epoch < until:
            for rows in torch.randperm(len(x)).split(64):
                self.optimizer.zero_grad()
                output = self.model(x[rows].to(self.model.devices[0]))
                loss = F.cross_entropy(output, y[rows].to(output.device))
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                losses.append(loss.item())
            self.schedule.step()
            self.epoch += 1
        return losses


def save_one_file(path: Path, t: Training) -> None:
    """Save all in one file; one tensor at a time is copied to the host."""
    state = {"model": t.model.module.state_dict(), "optimizer": t.optimizer.state_dict()}
    torch.save(state | t.rest(), path / "training.pt")


def load_one_file(path: Path, t: Training) -> None:
    """Load one file into the host's memory; without map_location it would go to the old devices."""
    state = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    t.model.load_state_dict(state["model"])
    t.optimizer.load_state_dict(state["optimizer"])
    t.load_rest(state)


def save_partitions(path: Path, t: Training) -> None:
    """Save a file for each partition, under the plain names of its layers."""
    for j, partition in enumerate(t.model.partitions):
        save_model(partition, str(path / f"weights-{j}.safetensors"))
    torch.save({"optimizer": t.optimizer.state_dict()} | t.rest(), path / "training.pt")


def load_partitions(path: Path, t: Training) -> None:
    """Load files that each have some of the layers, and together have all."""
    missing = set(t.model.state_dict())
    for file in path.glob("*.safetensors"):
        keys = t.model.load_state_dict(load_file(file), strict=False)
        missing &= set(keys.missing_keys)
        if keys.unexpected_keys:
            raise ValueError(f"the model has no {keys.unexpected_keys}, but {file} has")
    if missing:
        raise ValueError(f"no file has {sorted(missing)}")
    state = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    t.optimizer.load_state_dict(state["optimizer"])
    t.load_rest(state)


def distributed(t: Training) -> dict[str, Any]:
    """The state of a training by names: the optimizer's state has those of model.module, too."""
    model, optimizer = get_state_dict(t.model.module, t.optimizer)
    return {"model": model, "optimizer": optimizer, "rest": t.rest()}


def save_distributed(path: Path, t: Training) -> None:
    """Save by torch.distributed.checkpoint."""
    # It must not copy ahead: it would copy from all devices, and wait for one of them only.
    dcp.save(distributed(t), storage_writer=dcp.FileSystemWriter(path, per_thread_copy_ahead=0))


def load_distributed(path: Path, t: Training) -> None:
    """Load into the tensors of the training, by names."""
    state = distributed(t)
    dcp.load(state, checkpoint_id=path)
    weights, optimizer = state["model"], state["optimizer"]
    set_state_dict(
        t.model.module, t.optimizer, model_state_dict=weights, optim_state_dict=optimizer
    )
    t.load_rest(state["rest"])


WAYS = {
    "torch.save": (save_one_file, load_one_file),
    "safetensors": (save_partitions, load_partitions),
    "distributed": (save_distributed, load_distributed),
}


def layers() -> nn.Sequential:
    """The layers of a classifier of points."""
    a, b = ([nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)] for _ in "ab")
    return nn.Sequential(nn.Linear(8, 32), *a, *b, nn.Linear(32, 4))


def data() -> tuple[Tensor, Tensor]:
    """Points, and the class that another model gives each of them."""
    generator = torch.Generator().manual_seed(0)
    x, teacher = (torch.randn(n, 8, generator=generator) for n in (512, 4))
    return x, (x @ teacher.T).argmax(1)


def main(arguments: list[str] | None = None) -> int:
    """Stop and go on in each way; return 0 if every loss is as in a training without a stop."""
    parser = argparse.ArgumentParser(description="Save a training, and go on elsewhere.")
    parser.add_argument("--epochs", type=at_least(1), default=6)
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, y = data()

    whole = Training([3, 3, 2, 2], options, seed=0)
    expected = whole.run(options.epochs, x, y)
    print(f"{'saved by':<12}  balances             first loss  last loss  steps that differ")
    print(f"{'(no stop)':<12}  {[3, 3, 2, 2]!s:<19}  {expected[0]:10.6f}  {expected[-1]:9.6f}")
    differing = 0
    for name, (save, load) in WAYS.items():
        with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
            # torch.distributed.checkpoint warns each time that there is only one process.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            before = Training([3, 3, 2, 2], options, seed=0)
            losses = before.run(options.epochs // 2, x, y)
            save(Path(directory), before)
            # Another process could begin here, with other weights and other random numbers.
            after = Training([6, 4], options, seed=1)
            load(Path(directory), after)
            losses += after.run(options.epochs, x, y)
        different = sum(a != b for a, b in zip(losses, expected, strict=True))
        balances = f"{before.model.balance}, {after.model.balance}"
        print(f"{name:<12}  {balances:<19}  {losses[0]:10.6f}  {losses[-1]:9.6f}  {different:>17}")
        differing += different

    plain = layers().eval()
    plain.load_state_dict(whole.model.module.state_dict())
    with torch.no_grad():
        output = whole.model.eval()(x.to(whole.model.devices[0])).to(x.device)
        apart = (output - plain(x)).abs().max().item()
    print(f"the plain model with these weights: outputs differ by {apart:.1e} at most")
    if differing or apart > 1e-4 or expected[-1] > expected[0] / 2:
        print("Not as it should be: a loss or an output differs, or the loss has not halved.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
