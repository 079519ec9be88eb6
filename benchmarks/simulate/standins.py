"""Stand-ins for partitions, of known cost, on virtual accelerators.

A stand-in takes the virtual time of its partition, and passes on a tensor for each one that the
partition passes on, skips included, so many times smaller as the links are slower. Thus a step of
the largest model takes as long as it would at the rates of a GPU, and next to nothing to compute.
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

#: How many bytes of the model are one of its stand-in.
SCALE = 4096


@dataclass(frozen=True)
class StageCosts:
    """What the partitions of a model cost for a micro-batch; times are in milliseconds.

    Args:
        forward: of each partition.
        backward: likewise.
        values: the numbers that each partition but the last passes on.
        skips: from which partition to which one, and how many numbers.
        link: numbers per millisecond.
    """

    forward: list[float]
    backward: list[float]
    values: list[int]
    skips: list[tuple[int, int, int]]
    link: float

    def limit(self, mode: str, m: int, free: bool = False) -> float:
        """What a step takes if each task starts as soon as it may.

        Args:
            mode: what is checkpointed.
            m: how many micro-batches there are.
            free: whether copies take no time.
        """
        time = 0.0 if free else 1 / self.link
        copies = [numbers * time for numbers in self.values]
        skips = [(a, b, numbers * time) for a, b, numbers in self.skips]
        return step_path(mode, m, self.forward, self.forward, self.backward, copies, skips)


def cut(costs: Costs, balance: list[int], link: float) -> StageCosts:
    """Adds up the costs of layers by partition.

    Args:
        costs: of the layers.
        balance: how many layers each partition has.
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
    """How many numbers stand for so many bytes."""
    return max(1, round(size / (4 * SCALE)))


def stand_in(stages: StageCosts, j: int, busy: Any) -> nn.Module:
    """A stand-in for a partition.

    Args:
        stages: what all of them cost.
        j: which one.
        busy: the autograd function that takes virtual time.
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
            # There is something to compute again: what is saved is not the input.
            done: Tensor = busy.apply(input.tanh(), self.weight, costs, COMPUTES)
            done = done.sum(1, keepdim=True)
            for name, size in stashed.items():
                yield stash(name, done.repeat(1, size))
            return done.repeat(1, value)

    layer: nn.Module = skippable(stash=[*stashed], pop=popped)(StandIn)()
    return layer


#: What the spans of a stand-in are called, after F and W.
COMPUTES = " computes"


class Steps:
    """A pipeline of stand-ins, in the process of a rival.

    Args:
        library: what makes the pipeline.
        stages: the arguments of :class:`StageCosts`.
        m: how many micro-batches.
        mode: what is checkpointed.
    """

    def __init__(self, library: Library, stages: dict[str, Any], m: int, mode: str) -> None:
        self.library, self.stages = library, StageCosts(**stages)
        n = len(self.stages.forward)
        busy = library.testing.busy.BusyFunction
        layers = nn.Sequential(*[stand_in(self.stages, j, busy) for j in range(n)])
        self.devices = library.devices[:n]
        self.model = library.wrap(layers, [1] * n, devices=self.devices, chunks=m, checkpoint=mode)
        self.input = torch.ones(m, 1, device=self.devices[0])
        # Threads and streams are made.
        self.model(self.input).sum().backward()

    def measure(self, seed: int | None = None, free: bool = False) -> dict[str, Any]:
        """One step, in milliseconds of virtual time.

        A link carries any number of copies at once, each at its full rate.

        Args:
            seed: of random delays of the host's threads, or None.
            free: whether copies take no time.

        Raises:
            RuntimeError: something in it was not ordered after another.
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
