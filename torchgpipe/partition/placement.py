"""Placement: partitions are moved to their devices, and weights at home elsewhere are lent."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe._torch.attributes import modules_of
from torchgpipe._torch.checkpoints import repeating
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.autograd.versions import address_of, version_of
from torchgpipe.devices.streams import canonical_device

__all__: list[str] = []


def place(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Move each partition to its device.

    Tensors on the meta device get memory on the partition's device, filled with NaN (integers with
    zero), so that weights that are never loaded cannot pass for loaded ones. Tensors that are
    shared stay shared.

    Raises:
        ValueError: a buffer is shared by partitions on different devices, or a buffer on the meta
            device could not be loaded later.
    """
    verify_sharing(partitions, devices)
    verify_loading(partitions, devices)
    #: For each tensor, its home device: the device of the first partition that has the tensor.
    homes: dict[Tensor, torch.device] = {}
    for partition, device in zip(partitions, devices):
        for _, x in tensors(partition):
            homes.setdefault(x, device)
    with sharing(chain.from_iterable(map(tables, partitions))):
        for partition in partitions:
            move(partition, homes)


def move(module: nn.Module, homes: Mapping[Tensor, torch.device], *, recurse: bool = True) -> None:
    """Move tensors of a module, and their gradients, to their home devices."""
    for inner in module.modules() if recurse else [module]:
        table: dict[str, Any] = inner._parameters
        for name, x in table.items():
            # A packed weight is a parameter whose class has a ``to()`` of its own, which moves it
            # here: for some devices Module._apply() calls nn.Parameter(), which refuses its class.
            if x is not None and type(x).to is not Tensor.to and x.device != homes.get(x, x.device):
                table[name] = x.to(homes[x])
    known = {**homes, **{x.grad: home for x, home in homes.items() if x.grad is not None}}
    # A tensor that is not in `known` was made when a shared one was moved, and is at home already.
    module._apply(lambda x: moved_to(known[x], x) if x in known else x, recurse=recurse)


@contextmanager
def sharing(tables: Iterable[dict[str, Tensor | None]]) -> Iterator[None]:
    """Let tensors that several dicts share stay shared when a ``with`` block moves them."""
    entries = [(table, name, x) for table in tables for name, x in table.items() if x is not None]
    yield
    # Module._apply may make a new tensor for each dict that holds a shared one. Here all of these
    # dicts get the tensor that was made for the first of them.
    moved: dict[Tensor, Tensor | None] = {}
    for table, name, tensor in entries:
        table[name] = moved.setdefault(tensor, table[name])


def moved_to(device: torch.device, tensor: Tensor) -> Tensor:
    if not tensor.is_meta or device.type == "meta":
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    return made.fill_(torch.nan if made.is_floating_point() or made.is_complex() else 0)


def verify_sharing(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Check that no buffer is needed on two devices, one of which may change it.

    Raises:
        ValueError: a buffer is shared by partitions on different devices; the message
            proposes a balance, and devices, that would do.
    """
    faults, merged = _shared(partitions, devices)
    if faults:
        balance: list[int] = []
        for partition, joins in zip(partitions, merged):
            if joins:
                balance[-1] += len(partition._modules)
            else:
                balance.append(len(partition._modules))
        proposed = [str(devices[k]) for k in groups(partitions)]
        raise ValueError(
            "a buffer can be shared only by layers on one device "
            f"({'; '.join(faults)}); keep these layers in one partition, as with "
            f"balance={balance}, or on one device, as with devices={proposed}"
        )


def _shared(
    partitions: Sequence[nn.Module], devices: Sequence[torch.device]
) -> tuple[list[str], list[bool]]:
    """The buffers on two devices, and whether each partition shares with the one before it.

    A partition between two that share counts, since it has to be merged with them.
    """
    owners: dict[Tensor, tuple[str, int]] = {}
    faults: list[str] = []
    merged = [False] * len(partitions)
    for j, partition in enumerate(partitions):
        for name, tensor in partition.named_buffers(remove_duplicate=False):
            other, k = owners.setdefault(tensor, (name, j))
            merged[k + 1 : j + 1] = [True] * (j - k)
            if devices[k] != devices[j]:
                faults.append(f"{other}: {devices[k]}, {name}: {devices[j]}")
    return faults, merged


def groups(partitions: Iterable[nn.Module]) -> list[int]:
    """Group the partitions that share layers or tensors; return the first of the group for each.

    Layers may have state, so partitions that share a layer must not compute at the same time.
    Torch's own layers without parameters and buffers, such as an activation, have no state.
    """
    partitions = list(partitions)
    group = list(range(len(partitions)))
    owners: dict[object, int] = {}
    for j, partition in enumerate(partitions):
        layers = [x for x in partition.modules() if not type(x).__module__.startswith("torch.nn.")]
        for thing in [*layers, *[tensor for _, tensor in tensors(partition)]]:
            one, other = group[owners.setdefault(thing, j)], group[j]
            if one != other:
                group = [min(one, other) if g in (one, other) else g for g in group]
    return group


def verify_loading(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Check that no integer buffer on the meta device is left out of the state dict.

    Raises:
        ValueError: a buffer of integers or flags is on the meta device and not in the state dict.
    """
    for partition, device in zip(partitions, devices):
        for path, module in partition.named_modules() if device.type != "meta" else ():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.is_meta and not buffer.is_floating_point():
                    raise ValueError(
                        "a buffer that no state dict has must have its value when the module is "
                        f"wrapped (buffer: {path}.{name}, {buffer.dtype}, on the meta device); "
                        "make it on the CPU, or register it with persistent=True and load it"
                    )


def verify_placement(
    partitions: Sequence[nn.Module],
    devices: Sequence[torch.device],
    lent: Sequence[Sequence[tuple[Any, str]]] | None = None,
) -> None:
    """Check that all parameters and buffers are on the device of their partition.

    What is lent, by its places in each partition, may be on the device of another one.

    Raises:
        RuntimeError: a parameter or buffer was moved.
    """
    for j, (partition, device) in enumerate(zip(partitions, devices)):
        if tensor := elsewhere(partition, device, lent[j] if lent else (), devices):
            raise RuntimeError(
                "parameters and buffers must stay on the device of their partition (partition "
                f"{j}: {tensor}); move the tensor back, or wrap the module anew with other devices"
            )


def elsewhere(
    module: nn.Module,
    device: torch.device,
    lent: Iterable[tuple[Any, str]] = (),
    homes: Collection[torch.device] = (),
) -> str | None:
    """Describe the first parameter or buffer that is not on its device; None if there is none.

    What is lent, by its places, may be on its home device.
    """
    entries = {(id(table), key) for table, key in lent}
    for table in tables(module):
        for key, tensor in table.items():
            if tensor is None or tensor.device == device:
                continue
            if (id(table), key) not in entries or tensor.device not in homes:
                name = next(name for name, x in tensors(module) if x is tensor)
                return f"{device}, {name}: {tensor.device}"
    return None


def tables(module: nn.Module) -> list[dict[str, Tensor | None]]:
    """The dicts in which each submodule holds its parameters and its buffers."""
    dicts: list[dict[str, Tensor | None]] = []
    # mypy wants dicts of one type, and not one of parameters and one of tensors.
    for submodule in modules_of(module):
        dicts += [submodule._parameters, submodule._buffers]  # type: ignore[list-item]
    return dicts


def tensors(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, Tensor]]:
    """All parameters and buffers with their names; a shared one under each of its names."""
    return [
        *module.named_parameters("", recurse, remove_duplicate=False),
        *module.named_buffers("", recurse, remove_duplicate=False),
    ]


# Layers that FSDP2 has sharded (``torch.distributed.fsdp.fully_shard``).
#
# FSDP2 replaces the parameters of such layers: between steps each is a shard, and while layers run
# it is whole. So no other code may put an earlier parameter back.
#
# Nothing here imports torch.distributed.fsdp. A program without sharded layers does not need it.


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is one to which fully_shard was applied."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, getattr(fsdp, "FSDPModule", ()))


def exchanged(modules: Sequence[nn.Module]) -> set[nn.Module]:
    """The modules whose parameters FSDP2 replaces."""
    if "torch.distributed.fsdp" not in sys.modules:
        return set()
    return {below for module in modules if is_sharded(module) for below in module.modules()}


def is_shard(parameter: object) -> bool:
    """Whether a parameter is a shard, the form in which the optimizer sees it."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return isinstance(parameter, getattr(tensors, "DTensor", ()))


def verify_sharding(module: nn.Module, devices: Sequence[torch.device]) -> None:
    """Check that sharded layers are on a single device: FSDP2 has one in each process.

    FSDP2 would move the parameters of all partitions there. And the end of backward would not wait
    for the gradients that FSDP2 sums up on other devices.

    Raises:
        ValueError: there are sharded layers and several devices.
    """
    if len({*devices}) < 2 or "torch.distributed.fsdp" not in sys.modules:
        return
    for name, layer in module.named_modules():
        if is_sharded(layer):
            raise ValueError(
                "layers that fully_shard has sharded must be on one device with all others, since "
                f"FSDP2 knows one device of each process (layer: {name or type(layer).__name__}, "
                f"devices: {[str(device) for device in devices]}); for data parallelism wrap the "
                "model in DistributedDataParallel instead, and do not shard it"
            )


# Lent weights: modules compute with copies of weights that are at home on another device.
#
# A head that is tied to an embedding has the embedding's weight, and may be on the last device.
# There is one parameter, on its home device. In each step, each other device that needs it gets a
# copy, which autograd records. So the gradients of all micro-batches are added up on that device,
# and copied home once. While a module computes, the copies replace the parameters in its dicts.
# On the home device, modules compute with an alias of the parameter: see
# :mod:`torchgpipe.autograd.copy`.


#: Where a module holds a tensor: in this dict of parameters or buffers, under this name.
TableEntry: TypeAlias = tuple[dict[str, Tensor | None], str]


def places_of(modules: Iterable[tuple[nn.Module, torch.device]]) -> list[list[TableEntry] | None]:
    """Find where modules hold tensors of another device, or parameters that another device uses.

    Returns:
        For each module, the entries of its tables that hold these; None if there are none, and its
        tables are not used on another device.
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
    by_module: list[list[TableEntry] | None] = []
    for module, device in modules:
        places = [(t, name) for t, name, x in entries[module] if x.device != device or x in lent]
        known = places or not shared.isdisjoint(map(id, tables(module)))
        by_module.append(places if known else None)
    return by_module


class Lent:
    """The copies that a module computes with, in one step.

    Args:
        places: the entries of the module's dicts that the copies replace during a call.
        bring: copies tensors to the device of the module, differentiably.
        lock: held during a call, since other threads may call the module, too.
    """

    def __init__(
        self,
        places: Sequence[TableEntry],
        bring: Callable[[Sequence[Tensor]], Sequence[Tensor]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._places, self._bring, self._lock = places, bring, lock
        self._copies: dict[tuple[int, int, bool], tuple[Tensor, Tensor]] = {}

    def call(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes the module.

        Raises:
            RuntimeError: the module changed a copy, or replaced it, which others would not get.
        """
        # guard: weights that several threads lend
        with self._lock:
            tensors = [table[name] for table, name in self._places]
            copies = self._copies_of([x for x in tensors if x is not None])
            before = [(x, version_of(x), address_of(x)) for x in copies.values()]
            self._put([copies.get(id(x)) for x in tensors])
            try:
                # PyTorch's checkpoints call functions again in backward. repeating() has them call
                # the functions through self.call, and so with the copies in place.
                with repeating(lambda: self.call):
                    output = inner(*args, **kwargs)
            finally:
                after = [table.get(name) for table, name in self._places]
                self._put(tensors)
            same = {id(x) for x, *both in before if both == [version_of(x), address_of(x)]}
            pairs = [(x, now) for x, now in zip(tensors, after) if x is not None]
            changed = [x for x, now in pairs if now is not copies[id(x)] or id(now) not in same]
            if changed:
                raise _changed(changed)
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
        # A copy made without grad mode passes no gradient back, so it has a key of its own.
        return id(tensor), version_of(tensor), tensor.requires_grad and torch.is_grad_enabled()


def _changed(tensors: Sequence[Tensor]) -> RuntimeError:
    shapes = [tuple(x.shape) for x in tensors]
    return RuntimeError(
        "parameters and buffers that modules on several devices share must not be changed, or "
        f"replaced, by one of them, since others have copies (shapes: {shapes}); map these modules "
        "to one device"
    )
