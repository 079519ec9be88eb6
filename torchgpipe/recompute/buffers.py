"""The buffers that layers change in their forward: a second run finds what the first run found.

Spectral normalisation improves its vectors in each forward, a codebook moves, an average goes on.
So a second run must see the values of before the first run of its cell, and leave alone what other
cells have made of them since. Each first run copies the buffers that change, and the second run
works on a copy of this copy, which takes the buffer's place in the layer for that time.

Copying all buffers would cost a model with large masks or tables their memory once per micro-batch.
So the first step copies each buffer once, and learns from it which buffers the layers change.
Comparing values finds changes that PyTorch does not count, such as those through ``.data``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchgpipe.ambient.notes import warn
from torchgpipe.autograd.versions import version_of

__all__: list[str] = []

#: A layer and the name of its buffer.
Place: TypeAlias = tuple[nn.Module, str]

#: A buffer and its copy; None for a buffer without a tensor.
Copy: TypeAlias = tuple[Place, Tensor | None]

#: For each layer whether it changes its buffers, by their names and the layer's training flag.
Learned: TypeAlias = WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]]


class Seen(NamedTuple):
    """A buffer as it was at one time."""

    place: Place
    tensor: Tensor | None
    version: int
    #: A copy, for a buffer of which nothing is known yet.
    copy: Tensor | None = None

    @property
    def is_changed(self) -> bool:
        """Whether somebody has replaced the buffer, or changed it in place, since then."""
        now = _buffer(self.place)
        if now is not self.tensor or (now is not None and version_of(now) != self.version):
            return True
        if now is not None and now is self.copy:
            # Its lazy layer has made it meanwhile.
            return True
        return self.copy is not None and now is not None and not _equal(self.copy, now)


class Buffers:
    """The buffers of a partition that its layers change, or may change, in one step.

    Args:
        places: the buffers that a layer may change.
        learned: what earlier steps have learned about them; this step adds to it.
    """

    def __init__(self, places: Iterable[Place], learned: Learned) -> None:
        self._learned = learned
        self._changing: list[Place] = []
        #: Buffers of which nothing is known, and what the first of these cells found there.
        self._unknown: list[Place] = []
        self._watched: list[Seen] | None = None
        #: Buffers that no layer has changed so far.
        self._quiet: list[Seen] = []
        for place in places:
            module, name = place
            changes = learned.get(module, {}).get((name, module.training))
            if changes is None:
                self._unknown.append(place)
            elif changes:
                self._changing.append(place)
            else:
                self._quiet.append(_seen(place))
        #: The buffers of which nothing is known, as the step finds them.
        self._begun = [_seen(place) for place in self._unknown]
        #: Whether first runs have anything to copy, or to learn.
        self.any = bool(self._changing or self._unknown)

    def not_lasting(self) -> set[int]:
        """The identities of buffers that are not the same tensors in a second run."""
        buffers = [_buffer(place) for place in [*self._changing, *self._unknown]]
        return {id(x) for x in buffers if x is not None and not is_lazy(x)}

    def copied(self) -> list[Copy]:
        """Copy the buffers that change, before a first run."""
        once: dict[int, Tensor] = {}
        if self._watched is None:
            # Not when the step began: this stream will free the copies.
            self._watched = [_seen(place, once) for place in self._unknown]
        else:
            # A layer of another partition may share a buffer, and have changed it since.
            self.learn()
        copies = [(place, _copy(_buffer(place), once)) for place in self._changing]
        return copies + [(seen.place, seen.copy) for seen in self._watched]

    def learn(self) -> None:
        """Find out, after a first run, which buffers it has changed."""
        watched, self._watched = self._watched or [], []
        for seen in watched:
            if seen.is_changed:
                self._changing.append(seen.place)
                self._note(seen.place, True)
            else:
                self._watched.append(seen)

    def first_run(self, copies: list[Copy]) -> FirstRun:
        """Copy buffers before a first run, and learn from it, in a ``with`` block around it.

        Args:
            copies: where to put them, for the second run.
        """
        return FirstRun(self, copies)

    def settle(self) -> None:
        """Take note, after a forward, of the buffers that checkpointed cells have not changed."""
        for seen in self._watched or ():
            # Without the values, which belong to the stream of the partition.
            self._note(seen.place, seen._replace(copy=None).is_changed)
        for seen in self._begun if self._watched is not None else ():
            # A layer of an earlier partition may share the buffer, and have changed it.
            if seen.is_changed:
                self._note(seen.place, True)
        self._watched = []
        for seen in self._quiet:
            if seen.is_changed:
                self._note(seen.place, True)
                _warn(seen.place)

    def _note(self, place: Place, changes: bool) -> None:
        module, name = place
        self._learned.setdefault(module, {})[name, module.training] = changes


class FirstRun:
    """A first run, within a ``with`` block."""

    def __init__(self, buffers: Buffers, copies: list[Copy]) -> None:
        self.buffers, self.copies = buffers, copies

    def __enter__(self) -> None:
        self.copies += self.buffers.copied()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.buffers.learn()


def put(copies: Iterable[Copy]) -> None:
    """Give layers the copies, which have been made before a first run, for a second run."""
    once: dict[int, Tensor] = {}
    for (module, name), tensor in copies:
        # A copy once more, since other cells may share this one.
        module._buffers[name] = _copy(tensor, once)


def _buffer(place: Place) -> Tensor | None:
    module, name = place
    return module._buffers.get(name)


def _seen(place: Place, once: dict[int, Tensor] | None = None) -> Seen:
    tensor = _buffer(place)
    version = -1 if tensor is None else version_of(tensor)
    return Seen(place, tensor, version, None if once is None else _copy(tensor, once))


def _copy(tensor: Tensor | None, once: dict[int, Tensor]) -> Tensor | None:
    """Copy a buffer, once for all places where it is."""
    if tensor is None or is_lazy(tensor):
        # Its layer makes it in the first run. Second runs get copies of what it holds by then.
        return tensor
    if id(tensor) not in once:
        copy = tensor.detach().clone()
        if tensor.requires_grad:
            with torch.enable_grad():
                # No leaf, since layers may change it in place.
                copy = copy.requires_grad_().clone()
        once[id(tensor)] = copy
    return once[id(tensor)]


def _equal(a: Tensor, b: Tensor) -> bool:
    # Meta tensors have no values, and there are layouts that cannot be compared: versions must do.
    with suppress(RuntimeError, NotImplementedError):
        return torch.equal(a, b)
    return True


def _warn(place: Place) -> None:
    module, name = place
    warn(
        "under checkpointing, a layer that changes a buffer in its forward must do so from its "
        f"first step on (layer: {type(module).__name__}, buffer: {name}); do without the gradients "
        "of this step, which come from other values of the buffer than its outputs, or use "
        "checkpoint='never'. Later steps are right",
        RuntimeWarning,
    )
