"""AmoebaNet-D (L, D), the model that the papers on GPipe and torchgpipe measure.

A cell takes the outputs of the two cells before it. The nearer output arrives as the cell's input,
and the other as a skip past the cell between::

    ──→ cell 1 ──┬──→ cell 2 ──┬──→ cell 3 ──┬──→ cell 4 ──→
                 │             │      ↑      │      ↑
                 └─────────────│──────┘      …      │
                               └────────────────────┘

Within a cell each operation is a layer. Operations hand each other a tuple of the states that later
ones need, so GPipe can cut between any two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.models.genotype import (
    NORMAL,
    REDUCTION,
    FactorizedReduction,
    Genotype,
    convolution,
)
from benchmarks.models.skips import Stash, isolated
from torchgpipe.skip import Namespace, pop, skippable

__all__ = ["amoebanetd"]

States = tuple[Tensor, ...]


@skippable(pop=["skip"])
class Previous(nn.Module):
    """Make state 1 of a cell from the output of the last cell but one, and keep state 0."""

    def __init__(self, inputs: int, outputs: int, larger: bool) -> None:
        super().__init__()
        self.squeeze = (FactorizedReduction if larger else convolution)(inputs, outputs)

    def forward(self, state: Tensor) -> Generator[pop, Tensor, tuple[Tensor, Tensor]]:
        skip = yield pop("skip")
        return state, self.squeeze(skip)


class Operate(nn.Module):
    """One operation of a cell; its result becomes the last state.

    Args:
        operation: module that computes.
        at: place of its input in the tuple.
        keep: places of the states that later operations need.
        add: whether to add the result to the last state, which is then the left summand.
    """

    def __init__(self, operation: nn.Module, at: int, keep: Sequence[int], add: bool) -> None:
        super().__init__()
        self.operation = operation
        self.at, self.keep, self.add = at, tuple(keep), add

    def forward(self, states: States) -> States:
        outcome = self.operation(states[self.at])
        if self.add:
            outcome = states[-1] + outcome
        return (*[states[k] for k in self.keep], outcome)


class Join(nn.Module):
    """Join the remaining states along the channels."""

    def forward(self, states: States) -> Tensor:
        return torch.cat(states, dim=1)


def operations(genotype: Genotype, channels: int) -> Iterator[Operate]:
    """The ten operations of a cell; the first takes states 0 and 1."""
    live = [0, 1]
    inputs = [state for state, _ in genotype.operations]
    for k, (state, make) in enumerate(genotype.operations):
        needed = {*inputs[k + 1 :], *genotype.output}
        right = k % 2 == 1
        kept = [x for x in (live[:-1] if right else live) if x in needed]
        yield Operate(
            make(channels, genotype.stride if state < 2 else 1),
            at=live.index(state),
            keep=[live.index(x) for x in kept],
            add=right,
        )
        live = [*kept, 2 + k // 2]
    assert tuple(live) == genotype.output


class Cell(NamedTuple):
    """Plan of a cell; each of its states has ``channels`` channels."""

    name: str
    genotype: Genotype
    channels: int


def plan(num_layers: int, num_filters: int) -> list[Cell]:
    """Plans of all cells, in order."""
    cells = [Cell(f"stem{k}", REDUCTION, num_filters * k // 2) for k in (1, 2)]
    thirds = [k * num_layers // 3 for k in range(4)]
    for stage in range(3):
        channels = num_filters << stage
        if stage > 0:
            cells.append(Cell(f"reduction{stage}", REDUCTION, channels))
        cells += [
            Cell(f"normal{k + 1}", NORMAL, channels) for k in range(*thirds[stage : stage + 2])
        ]
    return cells


def amoebanetd(
    num_classes: int = 1000, num_layers: int = 4, num_filters: int = 512
) -> nn.Sequential:
    """AmoebaNet-D (L, D): images of shape ``(rows, 3, h, w)`` to logits ``(rows, num_classes)``.

    The model divides the size of images by 32, and rounds it up. In training batch normalisation
    needs more than one pixel in each micro-batch: images of more than 32 pixels, or two rows.

    The cells, their channels and the count of parameters are those of torchgpipe's model
    (https://arxiv.org/abs/2004.09910; kakaobrain/torchgpipe, ``benchmarks/models/amoebanet``). In
    three points this model follows TensorFlow's (tensorflow/tpu, ``models/official/amoeba_net``)
    instead: torchgpipe's takes the mean of nine pixels where the operation's name says maximum, has
    a ReLU before its first convolution, and has none after its last cell. TensorFlow's stem cells
    have half as many channels, which does not give the published counts.

    Args:
        num_classes: number of classes.
        num_layers: L, the number of normal cells. Cells that halve the image come after a third
            and two thirds of them, rounded down.
        num_filters: D, the channels of the first normal cells.

    Raises:
        ValueError: there are fewer than three layers, or D is not 8 or a greater multiple of 4.
    """
    if num_layers < 3:
        raise ValueError(f"there must be a layer in each third (num_layers: {num_layers}); take 3")
    if num_filters < 8 or num_filters % 4:
        raise ValueError(
            "a quarter of the filters must be a whole number above 1 "
            f"(num_filters: {num_filters}); take 8 or a greater multiple of 4"
        )
    cells = plan(num_layers, num_filters)
    skips = [Namespace() for _ in cells]
    before = current = num_filters // 4
    larger = False

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["conv"] = nn.Conv2d(3, current, 3, stride=2, padding=1, bias=False)
    layers["norm"] = nn.BatchNorm2d(current)
    # Only one output comes before the first cell, which takes that one twice.
    layers["stash"] = isolated(Stash(), skips[0])
    for (name, genotype, channels), skip, following in zip(cells, skips, [*skips[1:], None]):
        if following is not None:
            layers[f"{name}_stash"] = isolated(Stash(), following)
        layers[f"{name}_current"] = convolution(current, channels)
        layers[f"{name}_previous"] = isolated(Previous(before, channels, larger), skip)
        for k, operation in enumerate(operations(genotype, channels)):
            layers[f"{name}_{('left', 'right')[k % 2]}{k // 2 + 1}"] = operation
        layers[f"{name}_join"] = Join()
        before, current = current, channels * len(genotype.output)
        larger = genotype is REDUCTION
    layers["relu"] = nn.ReLU()
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classify"] = nn.Linear(current, num_classes)
    return nn.Sequential(layers)
