"""A model that is trained from the first step to the last, plain or under GPipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from benchmarks.models.images import Images, batches
from torchgpipe import GPipe

__all__ = ["Course", "Outcome", "Variant", "count", "grouped"]


@dataclass(frozen=True)
class Variant:
    """How a model is run.

    Args:
        n: over how many partitions, or None for the plain model, on whole mini-batches.
        deferred: whether batch normalisation is deferred.
    """

    n: int | None = None
    deferred: bool = False

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.n is None:
            return "plain"
        return f"n = {self.n}" + self.deferred * ", deferred"


@dataclass(frozen=True)
class Outcome:
    """What came out of a training.

    Args:
        losses: of each step.
        accuracy: on the test images, in percent.
        parameters: at the end, on the CPU.
        buffers: likewise.
    """

    losses: list[float]
    accuracy: float
    parameters: list[Tensor]
    buffers: list[Tensor]

    @property
    def digests(self) -> list[str]:
        """Short texts that are equal if the parameters, and the buffers, are so bit for bit."""
        return [digest(self.parameters), digest(self.buffers)]

    def difference_of_losses(self, other: Outcome) -> float:
        """The largest at any step, relative to the other's."""
        a, b = (torch.tensor(x.losses, dtype=torch.float64) for x in (self, other))
        return relative(a - b, b)

    def difference_of_parameters(self, other: Outcome) -> float:
        """The largest of any tensor, relative to the largest value of the other's."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return largest([relative((a - b).abs().max(), b.abs().max()) for a, b in pairs])


def relative(difference: Tensor, value: Tensor) -> float:
    """The largest of some differences, each relative to a value."""
    return largest(difference.abs() / value.abs().where(value != 0, 1))


def largest(values: Tensor | Sequence[float]) -> float:
    """The largest value, which is NaN if one is."""
    return torch.as_tensor(values, dtype=torch.float64).max().item()


@dataclass(frozen=True)
class Course:
    """A training: SGD with momentum; the rate rises for a fifth of the steps, and falls to zero.

    Args:
        images: what it is trained on, and tested.
        make: makes the model.
        dtype: what it computes in.
        devices: where partitions may sit.
        balances: for each number of partitions, how many layers each of them has.
        chunks: micro-batches of a mini-batch.
        epochs: how often it sees each image.
        batch: images in a mini-batch; those that do not fill one are left out of an epoch.
        rate: the highest learning rate.
        workers: processes that read images.
    """

    images: Images
    make: Callable[[], nn.Sequential]
    dtype: torch.dtype
    devices: Sequence[torch.device]
    balances: Mapping[int, list[int]]
    chunks: int
    epochs: int
    batch: int
    rate: float
    workers: int = 0

    def run(self, variant: Variant, seed: int) -> Outcome:
        """Trains from the weights, and in the order of the images, that the seed makes."""
        torch.manual_seed(seed)
        order = torch.Generator().manual_seed(seed)
        model = self.wrapped(self.make().to(self.dtype), variant)
        optimizer = torch.optim.SGD(model.parameters(), self.rate, momentum=0.9, weight_decay=5e-4)
        rows = count(self.images.train) // self.batch
        steps = self.epochs * rows
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda k: min(1, 5 * (k + 1) / steps) * (1 + math.cos(math.pi * k / steps)) / 2,
        )
        losses = []
        for _ in range(self.epochs):
            shuffled = torch.randperm(count(self.images.train), generator=order)
            of_epoch = shuffled.split(self.batch)[:rows]
            for images, labels in batches(self.images.train, of_epoch, self.workers):
                optimizer.zero_grad()
                output = model(images.to(self.devices[0], self.dtype))
                loss = F.cross_entropy(output, labels.to(output.device))
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
        return Outcome(
            losses,
            self.accuracy(model),
            [x.detach().cpu() for x in model.parameters()],
            [x.cpu() for x in model.buffers()],
        )

    def wrapped(self, layers: nn.Sequential, variant: Variant) -> nn.Module:
        """A model as a variant has it."""
        n = variant.n
        if n is None:
            return layers.to(self.devices[0])
        used = min(n, len(self.devices))
        return GPipe(
            layers,
            self.balances[n],
            devices=[self.devices[j * used // n] for j in range(n)],
            chunks=self.chunks,
            deferred_batch_norm=variant.deferred,
        )

    def accuracy(self, model: nn.Module) -> float:
        """Of how many of the test images a model tells the class, in percent."""
        rows = torch.arange(count(self.images.test)).split(self.batch)
        right = 0
        model.eval()
        with torch.no_grad():
            for images, labels in batches(self.images.test, rows, self.workers):
                output = model(images.to(self.devices[0], self.dtype))
                right += int((output.argmax(1).cpu() == labels).sum())
        model.train()
        return 100 * right / count(self.images.test)


def count(data: Dataset[tuple[Tensor, ...]]) -> int:
    """How many images there are."""
    return len(data)  # type: ignore[arg-type]  # Those of benchmarks.models.images have a length.


def digest(tensors: Sequence[Tensor]) -> str:
    """A short text that is another one for other bits."""
    found = sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def grouped(layers: nn.Sequential) -> nn.Sequential:
    """A model with group normalisation, which does not look at the batch, instead of batch's.

    Args:
        layers: the model, which is changed.
    """
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(math.gcd(channels, 8), channels))
    return layers
