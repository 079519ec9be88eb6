"""A whole training of a model, plain or under GPipe."""

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
    """The plain model or a pipeline.

    Args:
        n: number of partitions, or None for the plain model, which takes whole mini-batches.
        deferred: whether to defer batch normalisation.
    """

    n: int | None = None
    deferred: bool = False

    @property
    def name(self) -> str:
        """Name in tables."""
        if self.n is None:
            return "plain"
        return f"n = {self.n}" + self.deferred * ", deferred"


@dataclass(frozen=True)
class Outcome:
    """Losses, accuracy and weights of a training.

    Args:
        losses: of each step.
        accuracy: on the test images, in percent.
        parameters: at the end, on the CPU.
        buffers: at the end, on the CPU.
    """

    losses: list[float]
    accuracy: float
    parameters: list[Tensor]
    buffers: list[Tensor]

    @property
    def digests(self) -> list[str]:
        """Digests of the parameters and of the buffers, which are equal if all bits are."""
        return [digest(self.parameters), digest(self.buffers)]

    def difference_of_losses(self, other: Outcome) -> float:
        """Largest difference at any step, relative to the other's loss."""
        a, b = (torch.tensor(x.losses, dtype=torch.float64) for x in (self, other))
        return relative(a - b, b)

    def difference_of_parameters(self, other: Outcome) -> float:
        """Largest difference of any tensor, relative to the largest value of the other's."""
        pairs = zip(self.parameters, other.parameters, strict=True)
        return largest([relative((a - b).abs().max(), b.abs().max()) for a, b in pairs])


def relative(difference: Tensor, value: Tensor) -> float:
    """Largest of several differences, each relative to a value."""
    return largest(difference.abs() / value.abs().where(value != 0, 1))


def largest(values: Tensor | Sequence[float]) -> float:
    """Largest value, or NaN if any value is NaN."""
    return torch.as_tensor(values, dtype=torch.float64).max().item()


@dataclass(frozen=True)
class Course:
    """A training by SGD with momentum; the rate rises for a fifth of the steps, and falls to zero.

    Args:
        images: to train and to test on.
        make: makes the model.
        dtype: of the parameters and the images.
        devices: for the partitions.
        balances: number of layers in each partition, for each number of partitions.
        chunks: number of micro-batches in a mini-batch.
        epochs: number of times that the model sees each image.
        batch: images in a mini-batch; an epoch leaves out images that do not fill one.
        rate: highest learning rate.
        workers: number of processes that read images.
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
        """Train; the seed gives the initial weights and the order of the images."""
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
        """The plain model on a device, or a pipeline of it."""
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
        """Share of the test images that a model classifies rightly, in percent."""
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
    """Number of images."""
    return len(data)  # type: ignore[arg-type]  # The data sets of benchmarks.models.images have a length.


def digest(tensors: Sequence[Tensor]) -> str:
    """A short text that differs if any bit does."""
    found = sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def grouped(layers: nn.Sequential) -> nn.Sequential:
    """Replace batch normalisation by group normalisation, which treats each sample alone.

    Args:
        layers: the model, which is changed in place.
    """
    for module in list(layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                setattr(module, name, nn.GroupNorm(math.gcd(channels, 8), channels))
    return layers
