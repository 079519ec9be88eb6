"""Device maps: which modules are computed on which device, and which stay whole."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.devices.streams import Device
from torchgpipe.partition.arguments import checked_devices
from torchgpipe.partition.placement import TableEntry, move, places_of, sharing, tables, tensors
from torchgpipe.show.describe import DescribedPart

__all__: list[str] = []


class Wholes(NamedTuple):
    """A way to divide a model into blocks: modules that a device map keeps whole.

    A list, be it an ``nn.ModuleList`` or an ``nn.Sequential``, has no code between its entries, so
    it may be divided. A module with code of its own is divided only if it contains a module whose
    class is one of ``names``, or a list. If it only contains a list, and is an entry of a list
    itself, it must also be too large for blocks to be spread evenly over devices.
    """

    model: nn.Module
    names: Collection[str]

    @classmethod
    def of(cls, model: nn.Module, no_split: Collection[str] | None = None) -> Wholes:
        """Divide a model as its user says, or else as the model says."""
        names = getattr(model, "_no_split_modules", None) if no_split is None else no_split
        return cls(model, names or ())

    def blocks(self) -> dict[str, nn.Module]:
        """The blocks of the model by name."""
        return self._once(self._below("", self.model)) or {"": self.model}

    def coarsest(self) -> dict[str, nn.Module]:
        """The direct submodules of the model that have weights, as blocks."""
        return self._once(x for x in self.model.named_children() if _has_weights(x[1]))

    def finer(
        self, blocks: Mapping[str, nn.Module], costs: Mapping[str, float], count: int
    ) -> dict[str, nn.Module] | None:
        """Divide blocks that are too large to be spread evenly; None if there are none."""
        share = sum(costs.values()) / count
        pieces: list[tuple[str, nn.Module]] = []
        for name, block in blocks.items():
            parts = [(name, block)]
            # A list is divided even at half a device's share, since it has no code to cut through.
            if costs.get(name, 0.0) > (share / 2 if is_list(block) else share):
                parts = self._parts(name, block)
            pieces += parts
        divided = self._once(pieces)
        return divided if [*divided] != [*blocks] else None

    def _parts(self, name: str, block: nn.Module) -> list[tuple[str, nn.Module]]:
        divisible = name and not self._is_whole(block) and (is_list(block) or _has_list(block))
        parts = [*self._below(name, block)] if divisible else []
        return parts if sum(map(_has_weights, dict(parts).values())) > 1 else [(name, block)]

    def _below(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        within = is_list(module)
        for child, inner in module._modules.items():
            if inner is None:
                continue
            path = f"{name}.{child}" if name else child
            if not _has_weights(inner):
                # A module without weights, such as an activation, is a block only in a list.
                # Elsewhere it computes where its inputs are.
                if within and not is_list(inner):
                    yield path, inner
            elif self._is_divided(inner, within):
                yield from self._below(path, inner)
            else:
                yield path, inner

    def _is_divided(self, module: nn.Module, within: bool) -> bool:
        """Whether a module, perhaps within a list, is divided from the beginning at any cost."""
        if not is_called(module):
            return True
        if self._is_whole(module):
            return False
        inner = [x for x in module.modules() if x is not module]
        if any(type(x).__name__ in self.names for x in inner):
            return True
        holds = is_list(module) or any(isinstance(x, nn.ModuleList) and len(x) > 1 for x in inner)
        return holds and not within

    def _once(self, named: Iterable[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
        """Modules by name, without shared ones that have no weights."""
        several = with_several_names(self.model)
        return {
            name: module for name, module in named if _has_weights(module) or module not in several
        }

    def _is_whole(self, module: nn.Module) -> bool:
        return type(module).__name__ in self.names or is_compiled(module)


def is_called(module: nn.Module) -> bool:
    """Whether a module is called itself, as no ``nn.ModuleList`` is."""
    # What torch.compile() returns has ``forward`` as an attribute of the object, not of its class.
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def is_list(module: nn.Module) -> bool:
    """Whether a module has no code of its own between its entries."""
    if "forward" in module.__dict__ or is_compiled(module):
        return False
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def with_several_names(model: nn.Module) -> set[nn.Module]:
    """The modules that have several names in a model.

    One of them without weights, as an activation that all layers share, belongs to no device: it
    computes where its inputs are.
    """
    counts = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    return {module for module, count in counts.items() if count > 1}


def _has_list(module: nn.Module) -> bool:
    has_direct_weights = any(True for _ in module.parameters(recurse=False))
    return not has_direct_weights and any(
        is_list(x) and sum(map(_has_weights, x.children())) > 1 for x in module.modules()
    )


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


# A map names modules as :meth:`nn.Module.named_modules` does, and ``""`` is the model itself. A
# module belongs to the longest name that leads to it::
#
#   {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}
#
# A *mapped module* is computed as a whole: each module that the map names, if the map names none
# within it. {"": 0, "lm_head": 1} names one within the model, so the model is not computed as a
# whole. Its children are mapped modules in its place: lm_head on device 1, the others on 0.
# All code between mapped modules runs where its tensors are.


class Mapped:
    """A module that is computed as a whole on one device.

    Tensors that it shares with modules on other devices may be at home there. A module with names
    on several devices computes on these in turn, call by call.

    It holds the module by a weak reference, since the module's call refers to this object: a
    reference cycle would wait for the garbage collector.
    """

    __slots__ = ("_module", "device", "key", "lent", "name", "names", "words")

    def __init__(
        self, name: str, key: str, module: nn.Module, device: torch.device, words: str
    ) -> None:
        self.name, self.key, self.device, self.words = name, key, device, words
        self._module = weakref.ref(module)
        #: The entries, in the module's dicts of parameters and buffers, of tensors that several
        #: devices use. ``Lent`` replaces these by copies while the module runs; None without any.
        self.lent: list[TableEntry] | None = None
        #: A ``Mapped`` for each name but the first, if the module has names on several devices.
        self.names: Sequence[Mapped] = ()

    @property
    def module(self) -> nn.Module:
        """The module, as long as its wrapper or a caller holds it."""
        module = self._module()
        assert module is not None
        return module

    def called(self, counts: Counter[Mapped] | None) -> Mapped:
        """The module under the name of this call, if it has names on several devices.

        Args:
            counts: how often each was called, which this call adds to; None outside of steps.
        """
        if counts is None:
            return self
        counts[self] += 1
        # Nothing tells which of the names a call is meant for, so calls take the names in turn.
        return (self, *self.names)[(counts[self] - 1) % (1 + len(self.names))]


def checked_map(device_map: Mapping[str, Device], model: nn.Module) -> dict[str, torch.device]:
    """Check a device map, and return its devices by name.

    Raises:
        TypeError: the map is no mapping of names to devices.
        ValueError: a name leads to no module, or a parameter or buffer belongs to no name.
    """
    if not isinstance(device_map, Mapping) or not all(isinstance(x, str) for x in device_map):
        raise TypeError(
            "a device map has the names of modules and their devices (device_map: "
            f"{type(device_map).__name__}); pass such as {{'encoder': 0, 'decoder': 1}}"
        )
    if not device_map:
        raise ValueError(
            "a device map must have an entry (device_map: {}); {'': 0} puts the whole model on a "
            "device"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [name for name in device_map if name not in modules]
    if unknown:
        raise ValueError(
            f"each name of a device map must lead to a module (unknown: {unknown}); the model's "
            f"own modules are {[name for name, _ in model.named_children()]}"
        )
    devices = checked_devices(device_map.values(), len(device_map))
    checked = dict(zip(device_map, devices))
    homeless = [
        f"{path}.{name}" if path else name
        for path, module, key in owned(model, checked)
        if key is None
        # A non-persistent buffer, as a table of positions, needs no name: placed() finds a device.
        for name in [*module._parameters, *{*module._buffers} - module._non_persistent_buffers_set]
    ]
    if homeless:
        raise ValueError(
            "a device map must cover all parameters and buffers (without a device: "
            f"{homeless[:10]}); add a name that leads to them, or '' for all others"
        )
    return checked


def place(model: nn.Module, device_map: Mapping[str, torch.device]) -> None:
    """Move the modules of a model to their devices; shared tensors stay shared.

    The home of a tensor that several devices share is the device of the longest name that leads to
    it; of several such names, of the first one.
    """
    homes: dict[Tensor, torch.device] = {}
    modules = [*placed(model, device_map)]
    for _, module, device in sorted(modules, key=lambda x: -_length(owner(x[0], device_map))):
        for _, tensor in tensors(module, recurse=False):
            homes.setdefault(tensor, device)
    with sharing(tables(model)):
        for _, module, _ in modules:
            move(module, homes, recurse=False)


def _length(key: str | None) -> int:
    return -1 if key is None else len(key.split(".")) if key else 0


def placed(
    model: nn.Module, device_map: Mapping[str, torch.device]
) -> Iterator[tuple[str, nn.Module, torch.device]]:
    """Each module under each of its names, with its device."""
    first = next(iter(device_map.values()))
    for path, module, key in owned(model, device_map):
        # A module that no name leads to has non-persistent buffers at most: any device will do.
        yield path, module, first if key is None else device_map[key]


def owned(
    model: nn.Module, device_map: Mapping[str, torch.device]
) -> Iterator[tuple[str, nn.Module, str | None]]:
    """Each module under each of its names, with the name of the map that it belongs to.

    A name that belongs to no name of the map is left out if another one of the module does.
    """
    entries = [
        (path, module, owner(path, device_map))
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    at_home = {module for _, module, key in entries if key is not None}
    for path, module, key in entries:
        if key is not None or module not in at_home:
            yield path, module, key


def owner(name: str, device_map: Mapping[str, torch.device]) -> str | None:
    """The longest name of the map that leads to a module or tensor; None if there is none."""
    path = name.split(".")
    for count in reversed(range(len(path) + 1)):
        prefix = ".".join(path[:count])
        if prefix in device_map:
            return prefix
    return None


def mapped_modules(model: nn.Module, device_map: Mapping[str, torch.device]) -> list[Mapped]:
    """The modules that are computed as a whole, each once, or once for each name.

    These are the modules that the map names. Where a module cannot be computed as a whole, since
    the map has a name below it, or since it is a list that is not called itself, these are its
    modules with parameters or buffers, and all entries of a list.
    """
    by_module: dict[nn.Module, list[Mapped]] = {}
    several = with_several_names(model)
    for key, device in device_map.items():
        named = model.get_submodule(key)
        for name, module in _computed_as_a_whole(key, named, device_map, several):
            words = f"{name or 'the model'} on {device}"
            by_module.setdefault(module, []).append(Mapped(name, key, module, device, words))
    every = [
        (module, x)
        for module, aliases in by_module.items()
        for x in (aliases if len({x.device for x in aliases}) > 1 else aliases[:1])
    ]
    for (_, mapped), lent in zip(every, places_of([(module, x.device) for module, x in every])):
        mapped.lent = lent
    for module, (first, *others) in by_module.items():
        first.names = [x for other, x in every if other is module and x in others]
    return [first for first, *_ in by_module.values()]


def _computed_as_a_whole(
    name: str,
    module: nn.Module,
    device_map: Mapping[str, torch.device],
    several: Container[nn.Module],
) -> Iterator[tuple[str, nn.Module]]:
    """A module, if it can be computed as a whole, or those below it that belong to its device."""
    start = f"{name}." if name else ""
    divided = any(other.startswith(start) for other in device_map if other != name)
    if not divided and is_called(module):
        yield name, module
        return
    for child, inner in module.named_children():
        has_tensors = any(True for _ in inner.parameters()) or any(True for _ in inner.buffers())
        # A module without tensors computes where its inputs are. It is mapped only as an entry of a
        # list, unless it has several names, as an activation that all layers share.
        if start + child not in device_map and (
            has_tensors or (is_list(module) and inner not in several)
        ):
            yield from _computed_as_a_whole(start + child, inner, device_map, several)


def parts_of(
    model: nn.Module,
    device_map: Mapping[str, torch.device],
    modules: Iterable[Mapped],
    modes: Iterable[str],
) -> list[DescribedPart]:
    """Describe each device of a map."""
    layers: dict[torch.device, list[str]] = {}
    for mapped in modules:
        layers.setdefault(mapped.device, []).append(mapped.name or type(model).__name__)
    held: dict[torch.device, list[Tensor]] = {device: [] for device in layers}
    for _, module, device in placed(model, device_map):
        held.setdefault(device, []).extend(x for _, x in tensors(module, recurse=False))
    words: dict[torch.device, dict[str, None]] = {}
    for device, mode in zip(device_map.values(), modes):
        words.setdefault(device, {})[mode] = None
    return [
        DescribedPart(None, layers.get(x, ()), held[x], x, ", ".join(words.get(x, ())))
        for x in held
    ]
