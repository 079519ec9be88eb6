"""Device maps that fit: of all that do, the one whose slowest device is fastest.

The blocks are measured where the model is, and the memory of a step is that of one micro-batch,
recorded once. Each device gets blocks that follow each other, so all maps are searched, exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, pairwise
from math import hypot, inf
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.devices.streams import CPU, Device, has_streams
from torchgpipe.mapped.wholes import Wholes
from torchgpipe.partition.keeping import checkpointed
from torchgpipe.planner.blocks import Times, Units, refined, timed
from torchgpipe.planner.cuts import cut, evenest
from torchgpipe.planner.given import state_of
from torchgpipe.planner.map_memory import Footprint, recorded
from torchgpipe.planner.stages import Weights

__all__ = ["fitting_map", "fitting_maps"]


def fitting_maps(
    places: Sequence[torch.device],
    model: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    limits: Sequence[float],
    chunks: int,
    checkpoint: str,
) -> Iterator[dict[str, Device]]:
    """Propose device maps, the best one first, and then those of fewer, larger blocks.

    Args, Raises: as for :func:`fitting_map`.
    """

    def measure(blocks: Mapping[str, nn.Module]) -> Times:
        return timed(model, *args, blocks=blocks, **kwargs)

    wholes = Wholes.of(model)
    measured = refined(measure, wholes, len(places))
    options: dict[str, Any] = {"limits": limits, "chunks": chunks, "checkpoint": checkpoint}
    yield fitting_map(places, model, measured, args, kwargs, **options)
    for blocks in (wholes.blocks(), wholes.coarsest()):
        if [*blocks] != [*measured.blocks] and len(blocks) >= len(places):
            measured = measure(blocks)
            yield fitting_map(places, model, measured, args, kwargs, **options)


def fitting_map(
    places: Sequence[torch.device],
    model: nn.Module,
    times: Times,
    args: Any,
    kwargs: Any,
    *,
    limits: Sequence[float],
    chunks: int,
    checkpoint: str,
) -> dict[str, Device]:
    """Spread the blocks of a model over devices, as far as each has the memory.

    Args:
        places: the devices.
        model: the model. It is not changed.
        times: the times of its blocks.
        args: the arguments of a call, with the rows of a micro-batch.
        kwargs: likewise.
        limits: the bytes that each device may fill.
        chunks: the number of micro-batches.
        checkpoint: the checkpoint mode.

    Raises:
        ValueError: there are fewer blocks than devices, no block takes any time, or nothing fits.
    """
    units = Units(*times)
    units.verify(places)
    # Several entries of one device share its memory.
    limits = [x / places.count(y) for x, y in zip(limits, places)]
    fastest = evenest(units.costs, len(places), units.spreads)
    if min(limits) == inf:
        return units.placed(places, fastest)
    there = next((x for x in places if has_streams(x)), CPU)
    try:
        sections = recorded(model, times.blocks, args, kwargs, there)
    except RuntimeError as error:
        warn(
            "the memory of a model is seen in a backward of its sample, which has failed here, so "
            f"the device map 'auto' goes by times alone ({type(error).__name__}: {error}); pass a "
            "device map of your own if a device has too little memory"
        )
        return units.placed(places, fastest)
    footprint = Footprint(
        sections,
        weights_of(model, times.blocks),
        chunks,
        checkpointed(checkpoint, chunks),
        state_of(torch.optim.AdamW),
    )
    members = [*units.members.values()]
    shared = shared_by(times.blocks)

    @cache
    def peak(start: int, stop: int) -> float:
        # What belongs to no block goes with the first one.
        own = {*chain([None] if not start else [], *members[start:stop])}
        if shared.isdisjoint(own):
            return footprint.peak(own)
        return replace(footprint, weights=weights_of(model, times.blocks, own)).peak(own)

    if excesses(fastest, limits, peak):
        fastest = fitted(units.costs, units.spreads, limits, peak)
    over = excesses(fastest, limits, peak)
    if over:
        raise too_large(places, limits, over, chunks, checkpoint)
    return units.placed(places, fastest)


def excesses(
    sizes: Sequence[int], limits: Sequence[float], peak: Callable[[int, int], float]
) -> dict[int, float]:
    """By how many bytes devices have too little, by their numbers; those with enough are left out.

    Args:
        sizes: the number of units of each device.
        limits: the bytes of each device.
        peak: the most bytes that a device needs for units from one number to another.
    """
    ends = pairwise(accumulate(sizes, initial=0))
    found = {j: peak(*block) - limit for j, (block, limit) in enumerate(zip(ends, limits))}
    return {j: x for j, x in found.items() if x > 0}


def fitted(
    costs: Sequence[float],
    spreads: Sequence[float],
    limits: Sequence[float],
    peak: Callable[[int, int], float],
) -> list[int]:
    """Cut units into blocks that fit, of which the slowest is as fast as can be.

    Of the cuts that are as fast, but for what the spreads explain, it is the evenest. If nothing
    fits, it is the cut that needs the least beyond a device's memory.

    Args:
        costs: the cost of each unit.
        spreads: how far these may be off.
        limits: the bytes of each device.
        peak: the most bytes that a device needs for units from one number to another.

    Returns:
        The number of units of each device.
    """
    n, count = len(costs), len(limits)
    sums = [0.0, *accumulate(costs)]

    def lacking(j: int, start: int, stop: int) -> float:
        return max(0.0, peak(start, stop) - limits[j])

    def cost(j: int, start: int, stop: int) -> float:
        return inf if lacking(j, start, stop) else sums[stop] - sums[start]

    def excuses(excess: float, start: int, stop: int) -> bool:
        return excess <= hypot(*map(min, spreads[start:stop], costs[start:stop]))

    found = cut(n, count, cost, excuses)
    if any(lacking(j, a, b) for j, (a, b) in enumerate(pairwise(accumulate(found, initial=0)))):
        return cut(n, count, lacking)
    return found


def shared_by(blocks: Mapping[str, nn.Module]) -> set[str]:
    """The names of blocks that share a weight with another one."""
    counts = Counter(x for block in blocks.values() for x in {*block.parameters()})
    return {
        name for name, block in blocks.items() if any(counts[x] > 1 for x in block.parameters())
    }


def weights_of(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    own: Collection[str | None] | None = None,
) -> dict[str | None, Weights]:
    """The memory of the weights of each block, and under None of what belongs to none.

    A weight that several blocks share counts for the last one of them, the first in backward.

    Args:
        model: the model.
        blocks: its blocks by name.
        own: the names of those on one device; None for all. A weight whose home is another device
            comes as a copy, whose gradient leaves.
    """
    owners: dict[Tensor, str | None] = {}
    homes: dict[Tensor, str | None] = {}
    deepest = sorted(blocks.items(), key=lambda x: -len(x[0].split(".")))
    for name, module in (*deepest, (None, model)):
        for x in chain(module.parameters(), module.buffers()):
            homes.setdefault(x, name)
    for name, module in ((None, model), *blocks.items()):
        if own is None or name in own or name is None:
            owners |= dict.fromkeys(chain(module.parameters(), module.buffers()), name)
    found: dict[str | None, Weights] = {}
    for x, name in owners.items():
        before = found.get(name, Weights())
        changed = x.nbytes if x.requires_grad else 0
        if own is None or homes[x] in own:
            found[name] = Weights(before.all + x.nbytes, before.trainable + changed)
        elif name is not None:
            found[name] = Weights(before.all + x.nbytes + changed, before.trainable)
    return found


def too_large(
    places: Sequence[torch.device],
    limits: Sequence[float],
    over: Mapping[int, float],
    chunks: int,
    checkpoint: str,
) -> ValueError:
    """The error that no map fits, with what the nearest one lacks."""
    sums = Counter({places[j]: 0 for j in over})
    for j, size in over.items():
        sums[places[j]] += round(size)
    # Several entries of one device share its memory.
    room = {place: round(limit * places.count(place)) for place, limit in zip(places, limits)}
    lacking = ", ".join(
        f"{x} lacks {size} bytes, and may fill {room[x]}" for x, size in sums.items()
    )
    again = "" if checkpoint == "always" else "checkpoint='always', "
    return ValueError(
        "a model must fit into the memory of its devices, with its gradients and the state of "
        f"AdamW (chunks: {chunks}, checkpoint: {checkpoint}, the nearest map: {lacking}); use "
        f"more devices, {again}a larger limit as memory, or smaller micro-batches, which are more "
        "chunks of the same mini-batch and a sample with fewer rows, or pass a device map of your "
        "own"
    )
