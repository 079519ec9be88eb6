"""A pipeline of tiny layers, and a plain loop over them, in the process of a rival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter

import torch
from torch import Tensor, nn

from benchmarks.rivals.library import Library


class Cells:
    """``n`` partitions of two tiny layers, and ``m`` micro-batches of one row of two features.

    The second layer saves its output, so a checkpoint has something to recompute.

    Args:
        library: makes the pipeline.
        n: number of partitions.
        m: number of micro-batches.
        mode: which micro-batches the pipeline checkpoints.
        kind: of a step: ``"inference"`` is a forward without gradients, ``"forward"`` a forward
            with gradients, and ``"training"`` a forward and a backward.

    Raises:
        RuntimeError: the pipeline and the plain loop compute different values or gradients.
    """

    def __init__(self, library: Library, n: int, m: int, mode: str, kind: str) -> None:
        torch.manual_seed(0)
        layers = tiny(n)
        self.layers = nn.Sequential(*layers)
        self.devices = library.devices[:n]
        self.kind = kind
        self.input = torch.randn(m, 2).to(self.devices[0])
        self.micro_batches = self.input.split(1)
        self.pipeline = library.wrap(
            layers, [1] * n, devices=self.devices, chunks=m, checkpoint=mode
        )
        self.parameters = list(self.layers.parameters())
        self.plain = self.move_between if self.devices[0].type != "cpu" else self.loop
        found, expected = self.outcome(self.pipeline), self.outcome(self.plain)
        if len(found) != len(expected) or not all(map(torch.allclose, found, expected)):
            raise RuntimeError("the pipeline computes something else than the plain loop")

    def loop(self, input: Tensor) -> Tensor:
        """Run the layers on each micro-batch in turn."""
        return torch.cat([self.layers(x) for x in self.micro_batches])

    def move_between(self, input: Tensor) -> Tensor:
        """Run the layers in turn, with the copies between devices that a pipeline makes too."""
        outputs = []
        for x in self.micro_batches:
            for device, layer in zip(self.devices, self.layers):
                x = layer(x.to(device))
            outputs.append(x)
        return torch.cat(outputs)

    def step(self, model: Callable[[Tensor], Tensor]) -> float:
        """Drop the gradients of the previous step, and return the seconds of another."""
        for parameter in self.parameters:
            parameter.grad = None
        with torch.set_grad_enabled(self.kind != "inference"):
            start = perf_counter()
            output = model(self.input)
            if self.kind == "training":
                output.sum().backward()
            return perf_counter() - start

    def outcome(self, model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The output of a step and the gradients that it leaves."""
        self.step(model)
        with torch.no_grad():
            output = model(self.input)
        grads = [x.grad for x in self.parameters if x.grad is not None]
        return [x.cpu() for x in (output, *grads)]

    def measure(self, seconds: float) -> dict[str, dict[str, float]]:
        """Take steps of the plain loop and of the pipeline in turn, at least three of each.

        Returns:
            The least and the median microseconds per cell of either.
        """
        steps = {
            "plain": lambda: self.step(self.plain),
            "pipeline": lambda: self.step(self.pipeline),
        }
        return in_turn(steps, seconds, len(self.devices) * len(self.micro_batches))


def tiny(n: int) -> nn.Sequential:
    """Make ``n`` layers for which only the host takes time."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(n)])


def in_turn(
    steps: Mapping[str, Callable[[], float]], seconds: float, cells: int, least: int = 3
) -> dict[str, dict[str, float]]:
    """Take steps of each kind in turn.

    Args:
        steps: functions that take a step and return its seconds, by name.
        seconds: after which to stop.
        cells: number of cells in a step.
        least: number of steps of each kind, however long they take.

    Returns:
        The least and the median microseconds per cell of each kind.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = perf_counter() + seconds
    while len(times[next(iter(times))]) < least or perf_counter() < end:
        for name, step in steps.items():
            times[name].append(step())
    scale = 1e6 / cells
    return {
        name: {"min": round(scale * min(found), 3), "median": round(scale * median(found), 3)}
        for name, found in times.items()
    }
