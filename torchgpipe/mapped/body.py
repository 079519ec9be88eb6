"""The body of a cell: a mapped module, which is computed as a whole, once or twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn

from torchgpipe.ambient.context import registered
from torchgpipe.ambient.notes import Visit
from torchgpipe.engine.body import Body
from torchgpipe.mapped.containers import filling_nothing, tensors_of
from torchgpipe.mapped.exchanged import Attributes, CallAttributes
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

#: Stands for a course while a mapped module is computed.
INSIDE: Any = object()


class Current(threading.local):
    """The course that a thread runs, or :data:`INSIDE`; None outside of a step."""

    course: Any = None


current = registered(Current())


class inside:
    """Compute a mapped module as a whole, whatever it calls, within a ``with`` block."""

    def __enter__(self) -> None:
        self._outer, current.course = current.course, INSIDE

    def __exit__(self, *_: object) -> None:
        current.course = self._outer


class MappedBody(Body):
    """A mapped module in one stage of one step.

    Each stage has a body of its own, since recomputations of a norm write to a copy of its
    statistics that the body keeps.

    Args:
        name: the name of the module.
        module: the module.
        inner: the module's own call. Its class may have a ``__call__``, which has been called.
        lock: a lock to hold while the module runs for the second time.
        state: the state of the module; None in a step without recomputation.
        attributes: its attributes; None in a step without recomputation.
    """

    __slots__ = ("_inner", "attributes", "changes_input", "checkpointed", "omits", "shared")

    def __init__(
        self,
        name: str,
        module: nn.Module,
        inner: Callable[..., Any],
        lock: AbstractContextManager[Any],
        state: LayersState | None,
        attributes: Attributes | None,
    ) -> None:
        super().__init__(module, lock, state, False)
        self._inner, self.call = inner, partial(filling_nothing, name, inner)
        self.attributes = attributes
        # The model may use an input that the module changes in place, so none is cloned in forward.
        self.changes_input, self.in_place = self.in_place, False
        #: How many micro-batches, from the first, are computed under checkpointing.
        self.checkpointed = 0
        #: Whether outputs may be computed when somebody looks at them. Mode "except_last" keeps all
        #: of a micro-batch, and policies serve one recomputation.
        self.omits = False
        #: Whether another visit of the device calls the module, too.
        self.shared = False

    def run_alone(self, arguments: tuple[Any, Any], note: str = "") -> Any:
        """Run the module with its arguments as they are, where there is no recomputation.

        Args:
            arguments: the positional arguments, and the keyword arguments.
            note: as in :meth:`run`.
        """
        args, kwargs = arguments
        with inside():
            if not note:
                return self._inner(*args, **kwargs)
            visit = Visit(self.layers, tensors_of(arguments), tuple, note)
            with visit:
                output = self._inner(*args, **kwargs)
                visit.visit(*tensors_of(output))
        return output

    def run_twice(self, batch: Batch, given: CallAttributes | None, **more: Any) -> Batch:
        """Run the module under checkpointing, in forward or in recomputation.

        Args:
            batch: its arguments.
            given: the attributes that the first run has found.
            **more: for :meth:`run`.
        """
        with inside():
            if not is_recomputing():
                return self.run(batch, **more)
            # The inputs of recomputation are leaves, which cannot be changed in place.
            batch = self.kept(batch)
            # Most models set no attributes.
            if given is None or not (given.keys or given.deep):
                return self.run(batch, **more)
            # Modules on several devices may share objects in their attributes.
            # guard: contents of several devices
            with self.lock, given.restored():
                return self.run(batch, **more)

    def kept(self, batch: Batch) -> Batch:
        """Keep the arguments for a later run: as clones, if this run may change them in place."""
        if not self.changes_input:
            return batch
        return batch.map(lambda *xs: [x.clone() for x in xs], [VALUE])
