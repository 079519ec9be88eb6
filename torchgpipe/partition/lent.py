"""Lent weights: modules compute with copies of weights that are at home on another device.

A head that is tied to an embedding has the embedding's weight, and may be on the last device. There
is one parameter, on its home device. In each step, each other device that needs it gets a copy,
which autograd records. So the gradients of all micro-batches are added up on that device, and
copied home once. While a module computes, the copies replace the parameters in its dicts. On the
home device, modules compute with an alias of the parameter: see :mod:`torchgpipe.autograd.copy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import canonical_device
from torchgpipe.partition.placement import tables

__all__: list[str] = []

#: The dict of a module's parameters or buffers, and a name in it.
Place: TypeAlias = tuple[dict[str, Tensor | None], str]


def places_of(modules: Iterable[tuple[nn.Module, torch.device]]) -> list[list[Place] | None]:
    """Find where modules hold tensors of another device, or parameters that another device uses.

    Args:
        modules: modules, each with a device that it computes on.

    Returns:
        For each module, its places; None if it has none, and its dicts are not used on another
        device.
    """
    modules = [(module, canonical_device(device)) for module, device in modules]
    entries = {
        module: [(t, name, x) for t in tables(module) for name, x in t.items() if x is not None]
        for module, _ in modules
    }
    away = [
        (table, x)
        for module, device in modules
        for table, _, x in entries[module]
        if x.device != device
    ]
    lent, shared = {x for _, x in away if isinstance(x, nn.Parameter)}, {id(t) for t, _ in away}
    found: list[list[Place] | None] = []
    for module, device in modules:
        places = [(t, name) for t, name, x in entries[module] if x.device != device or x in lent]
        known = places or not shared.isdisjoint(map(id, tables(module)))
        found.append(places if known else None)
    return found


class Lent:
    """The copies that a module computes with, in one step.

    Args:
        places: the entries of the module's dicts that the copies replace during a call.
        bring: copies tensors to the device of the module, differentiably.
        lock: held during a call, since other threads may call the module, too.
    """

    def __init__(
        self,
        places: Sequence[Place],
        bring: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._places, self._bring, self._lock = places, bring, lock
        self._copies: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    def call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes the module.

        Raises:
            RuntimeError: the module changed a copy in place, which the weight would not get.
        """
        # guard: weights that several threads lend
        with self._lock:
            own = [table[name] for table, name in self._places]
            copies = self._copies_of([x for x in own if x is not None])
            versions = [(x, version_of(x)) for x in copies.values()]
            self._put([copies.get(id(x)) for x in own])
            try:
                output = inner(*args, **kwargs)
            finally:
                self._put(own)
            changed = {id(x) for x, version in versions if version_of(x) != version}
            if changed:
                raise _changed([x for x in own if x is not None and id(copies[id(x)]) in changed])
            return output

    def _put(self, tensors: Sequence[Tensor | None]) -> None:
        for (table, name), x in zip(self._places, tensors):
            table[name] = x

    def _copies_of(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        keys = {id(x): self._key(x) for x in tensors}
        missing = {id(x): x for x in tensors if keys[id(x)] not in self._copies}
        for x, copy in zip(missing.values(), self._bring([*missing.values()]) if missing else ()):
            self._copies[keys[id(x)]] = x, copy
        return {x: self._copies[key][1] for x, key in keys.items()}

    @staticmethod
    def _key(tensor: Tensor) -> tuple[int, int, bool]:
        # A copy that was made without grad mode passes no gradient back.
        return id(tensor), version_of(tensor), tensor.requires_grad and torch.is_grad_enabled()


def _changed(tensors: Sequence[Tensor]) -> RuntimeError:
    shapes = [tuple(x.shape) for x in tensors]
    return RuntimeError(
        "parameters and buffers that modules on several devices share must not be changed in place "
        f"by one of them, since others have copies (shapes: {shapes}); map these modules to one "
        "device"
    )
