"""The buffers that layers change in their forward: a recomputation finds what the first run found.

Spectral normalisation changes its vectors in each forward, and so do codebooks and moving averages
with their buffers. A recomputation must see the values from before the first run of its cell, and
must not touch the values that other cells have written since. So each first run copies the buffers
that change. The recomputation works on a copy of this copy, which replaces the buffer in the layer.

Copying all buffers in each cell would cost a model with large masks or tables their memory once per
micro-batch. So cells have one copy in common of a buffer that none of them has changed so far. The
first step learns which buffers the layers change, and compares values for that: PyTorch does not
count a change through ``.data``. In later steps there is no copy of a large buffer that layers only
read, and to change it between a forward and its backward is an error. Nor does PyTorch count what
norms change in training, so each first run copies their statistics, whatever was learned: a step on
zeros leaves a mean of zero as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import is_, is_not
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.autograd.versions import identities
from torchgpipe.recompute.once import OncePerMiniBatch
from torchgpipe.values.structure import is_dense

__all__: list[str] = []

#: Only buffers of these classes may be copied by one torch.cat(), which a subclass may override.
PLAIN = (Tensor, nn.Buffer)

#: In bytes, the largest size of a small buffer. Each step copies small buffers, also those that no
#: layer changes, so that a user may change them between a forward and its backward.
SMALL = 1 << 16

#: The names of norms' statistics. A norm in training mode changes them without a new version.
UNCOUNTED = ("running_mean", "running_var")

#: A layer, and the name of one of its buffers.
BufferKey: TypeAlias = tuple[nn.Module, str]

#: For each layer: (name of a buffer, training flag of the layer) -> whether forwards change the
#: buffer. The first step finds it out, and the steps after it need fewer copies.
Learned: TypeAlias = WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]


class Common:
    """Buffers that no layer has changed so far, and the copies that the cells of a step share."""

    def __init__(
        self, keys: list[BufferKey], tensors: list[Tensor], copies: list[Tensor | None]
    ) -> None:
        self.keys, self.tensors, self.copies = keys, tensors, copies
        self.before = identities(tensors)
        #: The keys and copies of statistics of norms in eval mode. put() always gives layers these
        #: copies: a norm in training mode may share a buffer, and changed() would not notice.
        self.read = [pair for pair in zip(keys, copies) if pair[0][1] in UNCOUNTED]
        #: The indices in `keys` of buffers that learn() found changed, but without a new version.
        self.uncounted: set[int] = set()

    def changed(self) -> list[int]:
        """The indices of buffers that are other tensors now, or have changed in place."""
        now = [module._buffers.get(name) for module, name in self.keys]
        if all(map(is_, now, self.tensors)) and identities(self.tensors) == self.before:
            return [*self.uncounted]
        both = zip(zip(*self.before), zip(*identities(self.tensors)))
        pairs = enumerate(zip(map(is_not, now, self.tensors), both))
        return [*self.uncounted, *[k for k, (other, (then, x)) in pairs if other or then != x]]


class Copied(NamedTuple):
    """The buffers as the first run of a cell has found them."""

    changing: list[tuple[BufferKey, Tensor | None]]
    common: Common

    def put(self) -> None:
        """Give layers the copies, for a recomputation.

        Raises:
            RuntimeError: a large buffer has changed, of which there is no copy.
        """
        common, changed = self.common, self.common.changed()
        for (module, name), copy in common.read:
            module._buffers[name] = copy
        for k in changed:
            if common.copies[k] is None:
                raise _changed(common.keys[k], common.tensors[k])
        # guard: buffers that layers read
        pairs = [*[(common.keys[k], common.copies[k]) for k in changed], *self.changing]
        # Copied once more: layers change what they get, and other recomputations need the values.
        copies = _copied([tensor for _, tensor in pairs])
        for ((module, name), _), copy in zip(pairs, copies):
            module._buffers[name] = copy


class Buffers:
    """The buffers of a partition in one step."""

    def __init__(self, keys: Iterable[BufferKey], learned: Learned) -> None:
        self._learned = learned
        #: The buffers that forwards may change: each cell copies them before its first run.
        self._changing: list[BufferKey] = []
        #: The buffers that forwards do not change, as far as is known when the step begins.
        self._steady: list[BufferKey] = []
        #: The buffers in `_steady` of which `_learned` does not say yet whether forwards change it.
        self._unknown: set[BufferKey] = set()
        for key in keys:
            module, name = key
            changes = learned.get(module, {}).get((name, module.training))
            # guard: statistics of norms
            if changes or module._buffers[name] is None or (name in UNCOUNTED and module.training):
                self._changing.append(key)
                continue
            self._steady.append(key)
            if changes is None:
                self._unknown.add(key)
        #: Whether the partition has buffers. Without any, recomputations need no copies.
        self.any = bool(self._changing or self._steady)
        #: The buffers in `_steady` as the first cell found them, with shared copies; None before.
        self._common: Common | None = None
        #: The indices in `_common.keys` of buffers that changed, which are in `_changing` as well.
        self._changed: set[int] = set()

    def not_lasting(self) -> set[int]:
        """The identities of buffers that are not the same tensors in a recomputation."""
        # A statistic in `_unknown` belongs to a norm in eval mode, which does not change it.
        keys = self._changing + [key for key in self._unknown if key[1] not in UNCOUNTED]
        buffers = [module._buffers[name] for module, name in keys]
        return {id(x) for x in buffers if x is not None and not is_lazy(x)}

    def first_run(self, copies: list[Copied]) -> FirstRun:
        """Copy buffers before a first run, and learn from it, in a ``with`` block around it."""
        return FirstRun(self, copies)

    def copied(self) -> Copied:
        """Copy the buffers that change, before a first run."""
        if self._common is None:
            # Copied within the first cell, and not in __init__, so that the memory belongs to the
            # cells' stream, which may use it again as soon as a copy is freed.
            buffers = [(key, key[0]._buffers.get(key[1])) for key in self._steady]
            pairs = [(key, x) for key, x in buffers if x is not None]
            copies = _copied([x if self._is_copied(key, x) else None for key, x in pairs])
            self._common = Common([key for key, _ in pairs], [x for _, x in pairs], copies)
        else:
            # From here on, cells copy buffers that earlier cells or other partitions have changed.
            self._look(self._common)
        copies = _copied([module._buffers.get(name) for module, name in self._changing])
        return Copied([*zip(self._changing, copies)], self._common)

    def _is_copied(self, key: BufferKey, x: Tensor) -> bool:
        module, name = key
        return (
            key in self._unknown
            or x.nbytes <= SMALL
            or name in UNCOUNTED
            # OncePerMiniBatch updates buffers after all forwards. Recomputations need old values.
            or isinstance(module, OncePerMiniBatch)
        )

    def learn(self) -> None:
        """Find out, after a first run, which buffers it has changed."""
        common = self._common
        if not self._unknown or common is None:
            return
        self._look(common)
        for k, (key, x, copy) in enumerate(zip(common.keys, common.tensors, common.copies)):
            if key in self._unknown and copy is not None and not _equal(x, copy):
                common.uncounted.add(k)
        self._look(common)

    def end_forward(self) -> None:
        """Take note, when all cells have run, of what they have changed."""
        if self._common is not None:
            self._look(self._common)
            for key in self._unknown:
                self._note(key, False)

    def _look(self, common: Common) -> None:
        """Have each cell copy buffers that have changed, from now on."""
        for k in common.changed():
            if k not in self._changed:
                self._changed.add(k)
                self._changing.append(common.keys[k])
                self._unknown.discard(common.keys[k])
                self._note(common.keys[k], True)

    def _note(self, key: BufferKey, changes: bool) -> None:
        module, name = key
        self._learned.setdefault(module, {})[name, module.training] = changes


class FirstRun:
    """A first run, within a ``with`` block."""

    def __init__(self, buffers: Buffers, copies: list[Copied]) -> None:
        self.buffers, self.copies = buffers, copies

    def __enter__(self) -> None:
        self.copies.append(self.buffers.copied())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.buffers.learn()


def _copied(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copy buffers: one that occurs several times is copied once.

    Small ones of a GPU are copied together: a model of a hundred norms has three hundred of them,
    and each copy takes a launch. The CPU has none, and copies them faster one by one.
    """
    copies: dict[int, Tensor] = {}
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        if x is None or id(x) in copies:
            continue
        if is_lazy(x):
            # A lazy buffer has no values yet. Copied.put() copies those that the first run sets.
            copies[id(x)] = x
        elif x.requires_grad:
            with torch.enable_grad():
                # The clone is no leaf: autograd would not let layers change a leaf in place.
                copies[id(x)] = x.detach().requires_grad_().clone()
        elif x.is_cpu:
            copies[id(x)] = x.clone()
        elif type(x) in PLAIN and is_dense(x) and x.nbytes <= SMALL and x.is_contiguous():
            small.setdefault((x.device, x.dtype), []).append(x)
            copies[id(x)] = x
        else:
            copies[id(x)] = x.clone()
    for alike in small.values():
        together = torch.cat([x.reshape(-1) for x in alike])
        for x, part in zip(alike, together.split([x.numel() for x in alike])):
            # Without .data, changing one part in place would change the version of all parts.
            copies[id(x)] = part.data.view(x.shape)
    return [None if x is None else copies[id(x)] for x in tensors]


def _equal(a: Tensor, b: Tensor) -> bool:
    # Tensors that cannot be compared, as on meta, count as equal: only versions tell of changes.
    with suppress(RuntimeError, NotImplementedError):
        return torch.equal(a, b)
    return True


def _changed(key: BufferKey, tensor: Tensor) -> RuntimeError:
    module, name = key
    return RuntimeError(
        "under checkpointing, a large buffer must not be changed between a forward and its "
        "backward, which computes the forward again, nor may a layer begin to change it after its "
        f"first step (layer: {type(module).__name__}, buffer: {name}, bytes: {tensor.nbytes}, "
        f"large: more than {SMALL}); change it after backward, or use checkpoint='never'"
    )
