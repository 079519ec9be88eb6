"""Stand-ins for partitions, of known cost, on virtual accelerators.

A stand-in takes the virtual time of its partition. For each tensor that the partition passes on,
skips included, it passes on a much smaller one, over a link that is slower by the same factor. Thus
a step of the largest model takes the virtual time of a GPU, and next to no real time.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.rivals.library import Library
from benchmarks.simulate.critical import step_path
from torchgpipe.skip import pop, skippable, stash

if TYPE_CHECKING:
    from benchmarks.simulate.costs import Costs

__all__ = ["StageCosts", "Steps", "cut", "stand_in"]

#: Bytes of the model for one byte of its stand-in.
SCALE = 4096


@dataclass(frozen=True)
class StageCosts:
    """Costs of the partitions of a model for a micro-batch; times are in milliseconds.

    Args:
        forward: time of each partition's forward.
        backward: time of each partition's backward.
        values: count of numbers that each partition but the last passes on.
        skips: source partition, target partition and count of numbers of each skip.
        link: numbers per millisecond.
    """

    forward: list[float]
    backward: list[float]
    values: list[int]
    skips: list[tuple[int, int, int]]
    link: float

    def limit(self, mode: str, m: int, free: bool = False) -> float:
        """Time of a step in which each task starts as soon as its inputs are there.

        Args:
            mode: which micro-batches are checkpointed.
            m: number of micro-batches.
            free: whether copies take no time.
        """
        time = 0.0 if free else 1 / self.link
        copies = [numbers * time for numbers in self.values]
        skips = [(a, b, numbers * time) for a, b, numbers in self.skips]
        return step_path(mode, m, self.forward, self.forward, self.backward, copies, skips)


def cut(costs: Costs, balance: list[int], link: float) -> StageCosts:
    """Add up the costs of layers by partition.

    Args:
        costs: of the layers.
        balance: number of layers in each partition.
        link: bytes per millisecond.
    """
    ends = [0, *accumulate(balance)]
    of_layer = [j for j, layers in enumerate(balance) for _ in range(layers)]
    skips: dict[tuple[int, int], int] = {}
    for source, target, size in costs.skips:
        route = of_layer[source], of_layer[target]
        if route[0] != route[1]:
            skips[route] = skips.get(route, 0) + size
    return StageCosts(
        [sum(costs.forward[a:b]) for a, b in pairwise(ends)],
        [sum(costs.backward[a:b]) for a, b in pairwise(ends)],
        [numbers(costs.outputs[end - 1]) for end in ends[1:-1]],
        [(a, b, numbers(size)) for (a, b), size in sorted(skips.items())],
        link / (4 * SCALE),
    )


def numbers(size: int) -> int:
    """Count of numbers that stand for ``size`` bytes."""
    return max(1, round(size / (4 * SCALE)))


def stand_in(stages: StageCosts, j: int, busy: Any) -> nn.Module:
    """A stand-in for a partition.

    Args:
        stages: costs of all partitions.
        j: number of the partition.
        busy: function that takes virtual time.
    """
    costs = stages.forward[j], 0.0, stages.backward[j]
    value = stages.values[j] if j < len(stages.values) else 1
    popped = [f"{a} to {b}" for a, b, _ in stages.skips if b == j]
    stashed = {f"{a} to {b}": size for a, b, size in stages.skips if a == j}

    class StandIn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input: Tensor) -> Generator[Any, Any, Tensor]:
            for name in popped:
                skip = yield pop(name)
                input = input + skip.sum(1, keepdim=True)
            # Saving tanh(input), and not the input, gives a checkpoint something to recompute.
            done: Tensor = busy(input.tanh(), self.weight, costs, COMPUTES)
            done = done.sum(1, keepdim=True)
            for name, size in stashed.items():
                yield stash(name, done.repeat(1, size))
            return done.repeat(1, value)

    layer: nn.Module = skippable(stash=[*stashed], pop=popped)(StandIn)()
    return layer


#: End of the name of a stand-in's spans, after F and W.
COMPUTES = " computes"


class Steps:
    """A pipeline of stand-ins, in the process of a rival.

    Args:
        library: makes the pipeline.
        stages: arguments of :class:`StageCosts`.
        m: number of micro-batches.
        mode: which micro-batches are checkpointed.
    """

    def __init__(self, library: Library, stages: dict[str, Any], m: int, mode: str) -> None:
        self.library, self.stages = library, StageCosts(**stages)
        n = len(self.stages.forward)
        busy = library.testing.busy.busy
        layers = nn.Sequential(*[stand_in(self.stages, j, busy) for j in range(n)])
        self.devices = library.devices[:n]
        self.model = library.wrap(layers, [1] * n, devices=self.devices, chunks=m, checkpoint=mode)
        self.input = torch.ones(m, 1, device=self.devices[0])
        # The first step makes threads and streams.
        self.model(self.input).sum().backward()

    def measure(self, seed: int | None = None, free: bool = False) -> dict[str, Any]:
        """One step, in milliseconds of virtual time.

        A link carries any number of copies at once, each at its full rate.

        Args:
            seed: of random delays of the host's threads, or None.
            free: whether copies take no time.

        Raises:
            RuntimeError: there was a race.
        """
        n = len(self.devices)
        link = self.stages.link * self.input.element_size()
        links = {(a, b): link for a in range(n) for b in range(n) if a != b and not free}
        with self.library.testing.observe(bandwidth=links, jitter=seed) as seen:
            self.model(self.input).sum().backward()
        busy = [0.0] * n
        for span in seen.spans:
            if span.name.endswith(COMPUTES):
                busy[span.stream.device] += span.end - span.start
        if seen.races:
            raise RuntimeError(f"there is a race: {seen.races[0]}")
        return {"ms": seen.makespan, "busy": sum(busy) / n / seen.makespan}
