"""Blocks of any model: what each takes of time and memory, and those that stay together.

A block is a module that a device map keeps whole: see :mod:`torchgpipe.mapped.device_map`. The
model's own forward runs on a sample, and each of its blocks is measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from math import hypot
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.ambient.generators import generator_of
from torchgpipe.ambient.random_numbers import get_state, set_state
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU, Device
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.planner.cuts import evenest
from torchgpipe.planner.sandbox import pooled, rounds, spread, undisturbed, verify_timed

__all__: list[str] = []


class Times(NamedTuple):
    """Times of the blocks of a model.

    Attributes:
        blocks: the blocks by name.
        costs: the seconds of each forward, by name, in the order of the calls. A block that is not
            called is left out.
        spreads: how far these may be off.
    """

    blocks: dict[str, nn.Module]
    costs: dict[str, float]
    spreads: dict[str, float]


def refined(measure: Callable[[dict[str, nn.Module]], Times], wholes: Wholes, count: int) -> Times:
    """Measure the blocks of a model, and divide those that would hold up so many devices."""
    times = measure(wholes.blocks())
    while (finer := wholes.finer(times.blocks, times.costs, count)) is not None:
        times = measure(finer)
    return times


def timed(
    model: nn.Module,
    *args: Any,
    blocks: Mapping[str, nn.Module],
    timeout: float = 1.0,
    **kwargs: Any,
) -> Times:
    """Measure the time that each block takes, as :func:`map_by_time` says.

    Raises:
        ValueError: no block takes any time.
    """
    home = next((x.device for x in model.parameters()), CPU)
    watches = {
        name: Stopwatch(next((x.device for x in block.parameters()), home))
        for name, block in blocks.items()
    }
    #: For each round, how long each block took; a block may be called several times.
    taken: list[dict[str, float]] = []

    def before(name: str, *_: Any) -> None:
        watches[name].start()

    def after(name: str, *_: Any) -> None:
        taken[-1][name] = taken[-1].get(name, 0.0) + watches[name].stop()

    def once() -> None:
        taken.append({})
        with hooked(blocks, before, after):
            model(*args, **kwargs)

    with unchanged(model), torch.no_grad():
        once()
        taken.clear()
        for _ in rounds(timeout):
            once()
    # A model may call its blocks in one round and not in another, but the order stays.
    names = [*dict.fromkeys(name for found in taken for name in found)]
    samples = [[found.get(name, 0.0) for found in taken] for name in names]
    kinds = [kind_of(blocks[name]) for name in names]
    times, noise = pooled(kinds, [*map(undisturbed, samples)], [*map(spread, samples)])
    verify_timed(times, home, "blocks", "move the model to the CPU before, by model.cpu()")
    return Times({**blocks}, dict(zip(names, times)), dict(zip(names, noise)))


class Units:
    """The blocks of a model in the order of their calls.

    A block without parameters goes with the one before it. Blocks that share a parameter may be on
    several devices, but not those that share the statistics of a norm, which they change.

    Args:
        blocks: the blocks by name.
        costs: what each costs, in the order of the calls.
        spreads: how far these may be off.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        costs: Mapping[str, float],
        spreads: Mapping[str, float] | None = None,
    ) -> None:
        self._order = [*costs, *[name for name in blocks if name not in costs]]
        weights = {name: [*block.parameters()] for name, block in blocks.items()}
        leader = {name: name for name in blocks}
        #: For each parameter, the first block that is called with it.
        called: dict[Tensor, str] = {}
        norms: dict[Tensor, str] = {}
        home = next((name for name in self._order if weights[name]), "")
        for name in costs:
            # An activation goes with the layer before it.
            if not weights[name]:
                leader[name] = leader.get(home, name)
            home = name
            for module in blocks[name].modules():
                if isinstance(mean := getattr(module, "running_mean", None), Tensor):
                    leader[name] = leader[norms.setdefault(mean, name)]
            for x in weights[name]:
                called.setdefault(x, name)
        #: The names of the blocks of each unit, by the first one.
        self.members: dict[str, list[str]] = {x: [] for x in costs if leader[x] == x}
        home = next(iter(self.members), "")
        for name in blocks:
            # What was not called may have a weight that the code around uses, as a table of
            # positions has. It goes with the block that is called with its weight, or else with
            # the one that was made before it.
            known = [name] if name in costs else [called[x] for x in weights[name] if x in called]
            home = leader[known[0]] if known else home
            self.members.setdefault(home, []).append(name)
        units = self.members.values()
        #: What each unit costs, and how far that may be off.
        self.costs = [sum(costs.get(name, 0.0) for name in names) for names in units]
        spreads = spreads or {}
        self.spreads = [hypot(*[spreads.get(name, 0.0) for name in names]) for names in units]

    def cut(self, devices: Sequence[Device]) -> list[int]:
        """The number of units of each device, such that the slowest is as fast as can be.

        Raises:
            ValueError: there are fewer units than devices.
        """
        if len(self.costs) < len(devices):
            raise ValueError(
                "there must be at least one block for each device (blocks: "
                f"{len(self.costs)}, devices: {len(devices)}); use fewer devices, or divide larger "
                "modules with a device map of your own"
            )
        return evenest(self.costs, len(devices), self.spreads)

    def placed(self, devices: Sequence[Device], sizes: Sequence[int]) -> dict[str, Device]:
        """The device map that gives each device so many units, in order."""
        places = [device for device, size in zip(devices, sizes) for _ in range(size)]
        found = {
            name: place for place, names in zip(places, self.members.values()) for name in names
        }
        # Parameters of modules that have blocks themselves are on the first device.
        return {"": devices[0], **{name: found[name] for name in self._order}}


def proposed(
    devices: Sequence[Device],
    blocks: Mapping[str, nn.Module],
    costs: Mapping[str, float],
    spreads: Mapping[str, float] | None = None,
) -> dict[str, Device]:
    """Spread blocks over devices in the order of their costs."""
    units = Units(blocks, costs, spreads)
    return units.placed(devices, units.cut(devices))


def kind_of(block: nn.Module) -> tuple[object, ...]:
    """The class of a block and the sizes of its parameters, by which blocks are alike."""
    sizes = [(x.shape, x.dtype) for x in block.parameters()]
    # Without parameters nothing tells how much there is to do.
    return (type(block), *sizes) if sizes else (block,)


@contextmanager
def hooked(
    blocks: Mapping[str, nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Call functions with the name of a block before and after its forward.

    The first one gets the block, its arguments, and its keyword arguments, too. A block with
    several names is called under one after another.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, block in blocks.items():
        names.setdefault(block, []).append(name)
    handles = []
    try:
        for block, own in names.items():
            firsts, seconds = cycle(own), cycle(own)
            handles += [
                block.register_forward_pre_hook(
                    lambda *given, names=firsts: before(next(names), *given), with_kwargs=True
                ),
                block.register_forward_hook(
                    lambda *given, names=seconds: after(next(names), *given)
                ),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model in train mode; leave its buffers, its mode and random numbers as they were."""
    buffers = {x: x.clone() for x in model.buffers()}
    # A forward may also put other tensors in the place of its buffers.
    tables = [(module._buffers, {**module._buffers}) for module in model.modules()]
    modes = {module: module.training for module in model.modules()}
    generators = {generator_of(x.device) for x in model.parameters()} | {CPU}
    states = {generator: get_state(generator) for generator in generators}
    try:
        model.train()
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for table, before in tables:
            table.update(before)
        with torch.no_grad():
            for x, values in buffers.items():
                # Tensors without values cannot be compared, and are copied at no cost.
                with suppress(RuntimeError):
                    if x.equal(values):
                        continue
                x.copy_(values)
        for generator, state in states.items():
            set_state(generator, state)
