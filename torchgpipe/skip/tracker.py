"""Skips on their way: between which partitions they lead, and values between stash and pop."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from torchgpipe._torch.dynamo import uncompiled_before_2_13
from torchgpipe.ambient.context import Swap, registered
from torchgpipe.values.microbatch import Batch, PackedSkip
from torchgpipe.values.structure import flatten

__all__: list[str] = ["Namespace"]


class Namespace:
    """A space of names for skips: skips of one name in two namespaces are different skips.

    Layers are put into a namespace by their method ``isolate``. A namespace that was copied or
    pickled stays the same namespace, so that the layers of a copied model find each other.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Namespace {str(self.id)[:8]}>"


#: A skip: its namespace (None if the layer was not isolated into one), and its name.
Skip: TypeAlias = tuple[Namespace | None, str]


def describe(skip: Skip) -> str:
    """The name of a skip in messages."""
    namespace, name = skip
    return repr(name) if namespace is None else f"{name!r} in {namespace}"


class Declared(NamedTuple):
    """The names that a class of layers declares."""

    stash: tuple[str, ...]
    pop: tuple[str, ...]


def namespaces(layer: nn.Module) -> dict[str, Namespace]:
    """The namespaces of the names that were isolated."""
    spaces: dict[str, Namespace] = layer.__dict__.get("skip_namespaces", {})
    return spaces


def skips(layer: nn.Module) -> tuple[list[Skip], list[Skip]]:
    """The skips that a layer stashes, and the skips that it pops; none if it is not skippable."""
    declared: Declared | None = getattr(type(layer), "skips_declared", None)
    if declared is None:
        return [], []
    spaces = namespaces(layer)
    return (
        [(spaces.get(name), name) for name in declared.stash],
        [(spaces.get(name), name) for name in declared.pop],
    )


class SkipLayout:
    """The skips that lead from one partition to another, as layers declare them."""

    def __init__(self, partitions: int, ends: dict[Skip, tuple[int, int]]) -> None:
        #: For each partition, the skips that it stashes, each with the partition that pops it.
        self.stashed: list[dict[Skip, int]] = [{} for _ in range(partitions)]
        #: For each partition, the skips that it pops, each with the partition that stashes it.
        self.popped: list[dict[Skip, int]] = [{} for _ in range(partitions)]
        for skip, (source, target) in ends.items():
            if source != target:
                self.stashed[source][skip] = target
                self.popped[target][skip] = source
        #: The pairs (source, target) of partitions that skips connect: all that a schedule needs.
        self.pairs = sorted({x for x in ends.values() if x[0] != x[1]})


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Find out between which partitions skips lead."""
    source: dict[Skip, int] = {}
    target: dict[Skip, int] = {}
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            stashed, popped = skips(layer)
            source.update(dict.fromkeys(stashed, j))
            target.update(dict.fromkeys(popped, j))
    return SkipLayout(len(partitions), {skip: (source[skip], j) for skip, j in target.items()})


class SkipTracker:
    """The values that were stashed and not popped yet.

    Within a wrapper each run of a partition on a micro-batch has a tracker. It begins with the
    values that the partition will pop, and ends with the values that later partitions will pop.
    """

    def __init__(self, values: Mapping[Skip, Any] | None = None) -> None:
        self.values: dict[Skip, Any] = dict(values) if values else {}

    @classmethod
    def of(cls, batch: Batch) -> SkipTracker:
        """A tracker with the skips of a micro-batch, put together for the layers that pop them."""
        # Most micro-batches have no skips: the value is their only part.
        if len(batch.parts) == 1:
            return cls()
        return cls({key: x.structure.unflatten(x.tensors) for key, x in batch.skips.items()})

    def parts(self) -> dict[Skip, PackedSkip]:
        """The values, taken apart; they stay so until they are popped.

        Raises:
            TypeError: a value holds tensors in something that is no known container.
        """
        return {skip: PackedSkip(*flatten(value)) for skip, value in self.values.items()}

    @uncompiled_before_2_13
    def save(self, skip: Skip, value: Any) -> None:
        """Stash a value."""
        self.values[skip] = value

    @uncompiled_before_2_13
    def load(self, skip: Skip) -> Any:
        """Pop a value, and keep no reference to it.

        Raises:
            RuntimeError: the value was not stashed.
        """
        if skip not in self.values:
            raise not_stashed(skip)
        return self.values.pop(skip)


def not_stashed(skip: Skip) -> RuntimeError:
    """The error for a skip that is popped and was not stashed."""
    return RuntimeError(
        "a skip must be stashed by an earlier layer before it is popped "
        f"(skip: {describe(skip)}); run the layers in order, and all of them. Where MappedGPipe "
        "checkpoints modules, stash and pop within one of them, or wrap the layers in a GPipe"
    )


class CurrentTracker(threading.local):
    """The tracker that a thread uses."""

    tracker: SkipTracker | None = None


_current = registered(CurrentTracker())


@uncompiled_before_2_13
def current_skip_tracker() -> SkipTracker:
    """The tracker that this thread uses."""
    if _current.tracker is None:
        # Outside of a wrapper, a thread has one tracker for all layers.
        _current.tracker = SkipTracker()
    tracker: SkipTracker = _current.tracker
    return tracker


def use_skip_tracker(tracker: SkipTracker) -> Swap:
    """Context manager that makes this thread use a tracker."""
    return Swap(_current, tracker=tracker)


class Parcels:
    """The skips of one micro-batch that were stashed and not popped yet."""

    def __init__(self) -> None:
        self._waiting: dict[Any, PackedSkip] = {}
        #: The keys of those parts of the micro-batch (the value, or a skip) that share memory with
        #: another part, so that it is an error to change them in place.
        self._shared: set[Any] = set()

    def unpacked(self, value: Batch, skips: Iterable[Any]) -> Batch:
        """Join a value and waiting skips, for the stage that pops them.

        Raises:
            RuntimeError: a skip was not stashed.
        """
        popped = {}
        for skip in skips:
            # Once taken out of _waiting, a skip is freed when the layer that pops it is done.
            # guard: letting go of a skip
            part = self._waiting.pop(skip, None)
            if part is None:
                raise not_stashed(skip)
            popped[skip] = part
        return value.with_skips(popped, self._shared) if popped else value

    def packed(self, output: Batch) -> Batch:
        """Keep the skips of an output; return the value alone, for the next stage."""
        if len(output.parts) == 1 and not (output.shared or self._waiting):
            return output
        value = self.put(output)
        if len(value) < 2 and not self._waiting:
            # Without skips there is no other part whose memory the value could share.
            value.shared = frozenset()
        return value

    def put(self, batch: Batch) -> Batch:
        """Keep the skips of a micro-batch; return the value alone."""
        if len(batch.parts) > 1:
            self._waiting.update(batch.skips)
        self._shared |= batch.shared
        return batch.with_skips({})
