"""States of layers: modes, numbers in attributes, and kinds of weights decide what is computed.

A graph stands for the layers in one state. A stage that is trained, evaluated and trained again
comes back to its first state, and to the graphs of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchgpipe.graphs.places import Places, UntraceableError, has_hooks
from torchgpipe.graphs.snapshot import Snapshot
from torchgpipe.graphs.traced import Traced
from torchgpipe.values.structure import ATOMS, Structure

__all__: list[str] = []

#: The number of kinds of micro-batches, in each state, that become graphs.
KINDS = 32


class Entry:
    """One kind of micro-batch.

    Args:
        structures: the structures of its parts, and that of the loss's further arguments.
    """

    def __init__(self, structures: Sequence[Structure]) -> None:
        self._structures = structures
        self._objects = _objects(structures)
        #: Whether the layers have run on this kind, and whether it was tried to trace it.
        self.has_run = self.is_tried = False
        #: The graph; None for eager cells.
        self.traced: Traced | None = None

    def fits(self, structures: Sequence[Structure]) -> bool:
        """Whether the structures of a micro-batch fit; its tensors are compared elsewhere."""
        return all(a.equals(b) for a, b in zip(self._structures, structures)) and (
            # The same object may have changed since.
            self._objects is None or self._objects.same(_objects(structures) or self._objects)
        )

    def verify(self) -> None:
        """Check that changes of objects in the structures can be seen.

        Raises:
            UntraceableError: they cannot.
        """
        if self._objects is not None and self._objects.fault:
            raise UntraceableError(self._objects.fault)


def _objects(structures: Sequence[Structure]) -> Snapshot | None:
    others = [x for some in structures for x in some.others.values()]
    # Zeros are equal, so the snapshot compares their signs.
    found = [x for x in others if type(x) not in ATOMS or (type(x) is float and x == 0)]
    return Snapshot([("an argument", x) for x in found]) if found else None


class StageState:
    """The layers of a stage in one state.

    Args:
        modules: the layers, and the loss if it is a module.
        others: the loss.
    """

    def __init__(self, modules: Sequence[nn.Module], others: Sequence[Any]) -> None:
        self._modules = modules
        self.hooks = has_hooks(modules)
        self.places = Places(modules, others)
        self._entries: dict[Any, list[Entry]] = {}
        #: The number of kinds of micro-batches that became graphs, or were tried.
        self.count = 0
        #: The number of steps in which the layers were in this state, and whether the state will
        #: not last long enough for a trace.
        self.steps, self.is_brief = 0, False

    def is_current(self) -> bool:
        """Whether the layers are in this state."""
        return self.places.are_current() and has_hooks(self._modules) == self.hooks

    def entry(self, key: Any, structures: Sequence[Structure]) -> Entry:
        """The entry of a kind of micro-batch."""
        entries = self._entries.get(key, ())
        for entry in entries:
            if entry.fits(structures):
                return entry
        if len(self._entries) > 8 * KINDS:
            # Kinds that came once are forgotten.
            self._entries = {
                key: found
                for key, some in self._entries.items()
                if (found := [x for x in some if x.is_tried])
            }
        entry = Entry(structures)
        self._entries[key] = [*self._entries.get(key, ()), entry]
        return entry

    @property
    def traced(self) -> list[Traced]:
        """All graphs."""
        return [x.traced for some in self._entries.values() for x in some if x.traced]
