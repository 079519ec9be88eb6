"""Device maps: the user's own, that of Accelerate, or of all that fit the fastest one.

The blocks are measured where the model is, and the memory of a step is that of one micro-batch,
recorded once. Each device gets blocks that follow each other, so all maps are searched, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain, pairwise
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.ambient.notes import add_note, noted
from torchgpipe.devices.streams import Device
from torchgpipe.mapped.device_map import Wholes, place
from torchgpipe.mapped.hugging_face import (
    on_cpu,
    release,
    takes_cache,
    verify_all_there,
    without_cache,
)
from torchgpipe.partition.keeping import Keeping, checkpointed, counted, is_policy
from torchgpipe.planner.blocks import Footprint, Measure, home_of, recorded, refined, timed
from torchgpipe.planner.cuts import cut, evenest
from torchgpipe.planner.given import (
    FILLED,
    Memory,
    arguments_of,
    has_no_place,
    limits_of,
    places_of,
    state_of,
)
from torchgpipe.planner.trial import by_device
from torchgpipe.values.division import FlatInput
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import Arguments

__all__: list[str] = []


class Units:
    """The blocks of a model in the order of their calls, with what each costs.

    A block without parameters goes with the one before it. Blocks that share a parameter may be on
    several devices, but not those that share the statistics of a norm, which they change.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], costs: Mapping[str, float]) -> None:
        weights = {name: [*block.parameters()] for name, block in blocks.items()}
        #: For each parameter, and the statistics of each norm, the first block called with them.
        users: dict[Tensor, str] = {}
        #: For each block that is called, the first one of its unit.
        leader: dict[str, str] = {}
        home = next((name for name in costs if weights[name]), "")
        for name in costs:
            # An activation goes with the layer before it.
            leader[name] = name if weights[name] else leader.get(home, home or name)
            home = name
            for module in blocks[name].modules():
                if isinstance(mean := getattr(module, "running_mean", None), Tensor):
                    leader[name] = leader[users.setdefault(mean, name)]
            for x in weights[name]:
                users.setdefault(x, name)
        #: The names of the blocks of each unit, by the first one.
        self.members: dict[str, list[str]] = {x: [] for x in costs if leader[x] == x}
        home = next(iter(self.members), "")
        for name in blocks:
            # What was not called may have a weight that the code around uses, as a table of
            # positions has. It goes with the block that is called with its weight, or else with
            # the one that was made before it.
            known = [name] if name in costs else [users[x] for x in weights[name] if x in users]
            home = leader[known[0]] if known else home
            self.members.setdefault(home, []).append(name)
        #: What each unit costs.
        self.costs = [sum(costs.get(x, 0.0) for x in names) for names in self.members.values()]

    def cut(
        self, limits: Sequence[float], need: Callable[[Collection[str | None]], float] | None = None
    ) -> tuple[list[int], list[float]]:
        """Cut units into blocks that fit, of which the slowest is as fast as can be.

        ``need`` tells the most bytes of a device with some blocks, and with None for what belongs
        to no block, which is on the first device. Without it all fits. If nothing fits, it is the
        cut that needs the least beyond a device's limit.

        Returns:
            The sizes, and the bytes that each block has too little.
        """
        n, count = len(self.costs), len(limits)
        if n < count:
            raise ValueError(
                f"there must be at least one block for each device (blocks: {n}, devices: {count});"
                " use fewer devices, or divide larger modules with a device map of your own"
            )
        if need is None:
            return evenest(self.costs, count), [0.0] * count
        sums, members = [0.0, *accumulate(self.costs)], [*self.members.values()]

        @cache
        def needed(start: int, stop: int) -> float:
            return need({*chain([] if start else [None], *members[start:stop])})

        def cost(j: int, start: int, stop: int) -> float:
            lack = needed(start, stop) - limits[j]
            # What does not fit costs more than all that fits, and the more, the more it lacks.
            return sums[-1] + lack if lack > 0 else sums[stop] - sums[start]

        sizes = cut(n, count, cost)
        ends = pairwise(accumulate(sizes, initial=0))
        return sizes, [max(0.0, needed(*block) - limit) for block, limit in zip(ends, limits)]

    def placed(self, devices: Sequence[Device], sizes: Sequence[int]) -> dict[str, Device]:
        """The device map that gives each device as many units as ``sizes`` says, in order."""
        places = [device for device, size in zip(devices, sizes) for _ in range(size)]
        units = zip(places, self.members.values())
        # Parameters of modules that have blocks themselves are on the first device.
        return {"": devices[0], **{name: place for place, names in units for name in names}}


def proposed(devices: Sequence[Device], wholes: Wholes, measure: Measure) -> dict[str, Device]:
    """Spread the blocks of a model over devices evenly by what they cost."""
    units = Units(*refined(measure, wholes, len(devices)))
    return units.placed(devices, units.cut([inf] * len(devices))[0])


def chosen_map(
    model: nn.Module,
    device_map: Mapping[str, Device] | str | None,
    sample: Any = None,
    devices: Iterable[Device] | None = None,
    *,
    memory: Memory | None = None,
    chunks: int = 1,
    checkpoint: Keeping = "except_last",
    rehearse: Callable[[Mapping[str, Device], Arguments], None] = lambda *_: None,
) -> Mapping[str, Device]:
    """Return the device map of a model, which loses the hooks of Accelerate.

    It is the user's own, or ``"auto"``, which measures the model with a sample. A map that was
    found is rehearsed with the sample, and gives way to another one if the model raises anything.
    Without accelerators, all is on the CPU.
    """
    if isinstance(device_map, str) and device_map != "auto":
        raise ValueError(
            "a device map has the names of modules and their devices, or is the word 'auto' "
            f"(device_map: {device_map!r}); pass 'auto' and a sample, or such as {{'encoder': 0, "
            "'decoder': 1}"
        )
    measuring = {"sample": sample, "devices": devices, "memory": memory}
    names = [key for key, x in measuring.items() if x is not None]
    if device_map != "auto" and names:
        raise ValueError(
            "a sample, devices and memory are for a device map that is measured (device_map: "
            f"{type(device_map).__name__}, given: {', '.join(names)}); leave them out, or pass "
            "'auto' as the device map"
        )
    verify_all_there(model)
    assert device_map is not None
    if isinstance(device_map, str):
        arguments = _arguments_of(model, sample)
        if has_no_place(devices):
            device_map = on_cpu(model)
        else:
            places = places_of(devices, are_one_each=False)
            # Several entries of one device share its memory.
            limits = zip(places, limits_of(memory, places))
            shares = [FILLED * limit / places.count(place) for place, limit in limits]
            maps = _maps(model, places, arguments, shares, chunks, checkpoint)
            device_map = _first_that_runs(model, maps, lambda x: rehearse(x, arguments))
    release(model)
    return device_map


def _arguments_of(model: nn.Module, sample: Any) -> Arguments:
    """The arguments of a call, where the model is."""
    if sample is None:
        raise ValueError(
            "the device map 'auto' needs a sample to measure the model with (sample: None); pass "
            "the arguments of a call with as many rows as a micro-batch"
        )
    # One micro-batch, which nobody divides.
    batch = Batch(FlatInput(arguments_of(sample)).whole)
    absent = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if absent is not None:
        raise ValueError(
            "a model on the meta device takes no time that could be measured for the device map "
            f"'auto' ({absent}: meta); load the model first, or pass a device map of your own"
        )
    home = home_of(model)
    near = [x.to(home) if x.device.type == "cpu" else x for x in batch]
    args, kwargs = batch.replace(near).value
    return Arguments(args, without_cache(kwargs) if takes_cache(model) else kwargs)


def _first_that_runs(
    model: nn.Module,
    maps: Iterator[dict[str, Device]],
    rehearse: Callable[[Mapping[str, Device]], None],
) -> Mapping[str, Device]:
    """Run a model with one map after another, and return the first one with which it runs."""
    home, failure = home_of(model), None
    for device_map in maps:
        # Accelerate's hooks would bring tensors to where they were before.
        release(model)
        try:
            rehearse(device_map)
            return device_map
        except Exception as error:
            failure = failure or error
            place(model, {"": home})
    assert failure is not None
    add_note(
        failure,
        "raised by the model with the device map 'auto', which has no map that its code runs "
        "with; pass a device map of your own that keeps together what the code uses together",
    )
    raise failure


def _maps(
    model: nn.Module,
    places: Sequence[torch.device],
    arguments: Arguments,
    limits: Sequence[float],
    chunks: int,
    checkpoint: Keeping,
) -> Iterator[dict[str, Device]]:
    """Propose device maps, the best one first, and then those of fewer, larger blocks."""
    args, kwargs = arguments

    def measure(blocks: Mapping[str, nn.Module]) -> dict[str, float]:
        return timed(model, blocks, args, kwargs)

    def map_of(blocks: Mapping[str, nn.Module], costs: Mapping[str, float]) -> dict[str, Device]:
        units, need = Units(blocks, costs), None
        if min(limits) < inf:
            calls = recorded(model, blocks, args, kwargs)
            again = checkpointed(counted(checkpoint), chunks)
            state = state_of(torch.optim.AdamW)
            need = Footprint(model, blocks, calls, chunks, again, state).need
        sizes, lacks = units.cut(limits, need)
        if any(lacks):
            raise _too_large(places, limits, lacks, chunks, checkpoint)
        return units.placed(places, sizes)

    wholes = Wholes.of(model)
    with noted("raised by the sample of the device map 'auto'"):
        blocks, costs = refined(measure, wholes, len(places))
        first = map_of(blocks, costs)
    yield first
    for coarser in (wholes.blocks(), wholes.coarsest()):
        if [*coarser] != [*blocks] and len(coarser) >= len(places):
            blocks = coarser
            try:
                proposal = map_of(blocks, measure(blocks))
            except ValueError:
                # This map does not fit. The model has raised with the first map, which did fit, and
                # the caller raises that error in the end, which says more.
                continue
            yield proposal


def _too_large(
    places: Sequence[torch.device],
    limits: Sequence[float],
    lacks: Sequence[float],
    chunks: int,
    checkpoint: Keeping,
) -> ValueError:
    """The error that no map fits, with what the nearest one lacks."""
    room = by_device(places, limits)
    lacking = ", ".join(
        f"{x} lacks {size} bytes, and may fill {room[x]}"
        for x, size in by_device(places, lacks).items()
        if size
    )
    again = "" if checkpoint == "always" else "checkpoint='always', "
    mode = "a policy" if is_policy(checkpoint) else checkpoint
    mode = mode if mode == counted(checkpoint) else f"{mode}, which counts as 'never'"
    return ValueError(
        "a model must fit into the memory of its devices, with its gradients and the state of "
        f"AdamW (chunks: {chunks}, checkpoint: {mode}, the nearest map: {lacking}); use "
        f"more devices, {again}a larger limit as memory, or smaller micro-batches, which are more "
        "chunks of the same mini-batch and a sample with fewer rows, or pass a device map of your "
        "own"
    )


def try_backward(model: nn.Module, outputs: Iterable[Iterable[Tensor]]) -> None:
    """Run backward, whose gradients go nowhere, to see that the memory of the devices is enough.

    Another failure than that may be no failure of the user's own backward: some models can only add
    to their gradients.
    """
    roots = [x for output in outputs for x in output if x.requires_grad]
    roots = [x for x in roots if not x.dim()] or roots
    weights = [x for x in model.parameters() if x.requires_grad]
    try:
        if roots and weights:
            grads = [torch.ones_like(x) for x in roots]
            torch.autograd.grad(roots, weights, grads, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
