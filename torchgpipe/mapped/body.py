"""The body of a cell: a mapped module, which is computed as a whole, once or twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe._torch.checkpoints import repeating
from torchgpipe.ambient.context import Swap, registered
from torchgpipe.ambient.notes import layer
from torchgpipe.engine.body import Body
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.structure import Structure

__all__: list[str] = []


#: ``current.course`` while a mapped module runs: all modules that it calls run as plain modules.
INSIDE: Any = object()


class Current(threading.local):
    """The course of the micro-batch that a thread runs, or ``INSIDE``; None outside of a step."""

    course: Any = None
    #: For each module with names on several devices in the map, the number of its calls so far: it
    #: is computed on these devices in turn. None unless ``calling_by_name()`` runs.
    counts: Counter[Mapped] | None = None


current = registered(Current())


def calling_by_name(
    counts: Counter[Mapped], inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a function in which each call of a module counts for the next of its names.

    Checkpoints of PyTorch within it count again in backward as they did in forward.
    """
    used = Counter(counts)
    with Swap(current, counts=used), repeating(lambda: partial(calling_by_name, Counter(used))):
        return inner(*args, **kwargs)


class inside:
    """Compute a mapped module as a whole, whatever it calls, within a ``with`` block.

    Args:
        glue: the mode for code between modules, which is off in the block if it is the innermost
            one. Within a module all tensors are on one device, and a mode takes a microsecond for
            each operator.
    """

    __slots__ = ("_glue", "_outer", "_popped")

    def __init__(self, glue: TorchFunctionMode | None = None) -> None:
        self._glue = glue

    def __enter__(self) -> None:
        self._outer, current.course = current.course, INSIDE
        count = 0 if self._glue is None else _torch.count_function_modes()
        self._popped = count and _torch.function_mode_at(count - 1) is self._glue
        if self._popped:
            _torch.pop_function_mode()

    def __exit__(self, *_: object) -> None:
        current.course = self._outer
        if self._popped:
            _torch.push_function_mode(self._glue)


class MappedBody(Body):
    """A mapped module in one stage of one step.

    Each stage has a body of its own, since the state of the module is that of its first call there.

    Args:
        module: the module.
        inner: the module's own call. Its class may have a ``__call__``, which has been called.
        lock: a lock to hold while the module runs for the second time.
        state: the state of the module; None in a step without recomputation.
        name: its name in the model.
    """

    __slots__ = (
        *("buffered", "changes_input", "checkpointed", "foreign", "name", "omits", "shared"),
    )

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        lock: AbstractContextManager[Any],
        state: LayersState | None,
        name: str = "",
    ) -> None:
        super().__init__(module, lock, state, False)
        self.call, self.name = inner, name
        # run() must not clone an input that the module changes in place: the model may read the
        # changes. Instead, kept() makes the clones that the recomputation needs.
        self.changes_input, self.in_place = self.in_place, False
        #: The number of micro-batches, from the first, that are computed under checkpointing.
        self.checkpointed = 0
        #: Whether outputs computed after this module may be left out until the caller reads them.
        #: Only in mode "always" has every micro-batch a checkpoint that can compute them.
        self.omits = False
        #: Whether the module may use tensors of other devices that are not among its arguments.
        #: Then ``Foreign``, a torch-function mode, brings these tensors to its device.
        self.foreign = False
        #: Whether several stages call the module. If so, visits of a device after the first ignore
        #: autocast's cached weights, whose memory may belong to the stream of another stage.
        self.shared = False
        #: The layers within the module that have buffers, which calls may change, so that stages
        #: call such a layer one after the other. None until the model comes back to a device.
        self.buffered: Sequence[nn.Module] | None = None

    def run_alone(self, arguments: tuple[Any, Any]) -> Any:
        """Run the module with its arguments as they are, where there is no recomputation."""
        args, kwargs = arguments
        return self.call(*args, **kwargs)

    def run_twice(self, batch: Batch, first_arguments: list[Any], **more: Any) -> Batch:
        """Run the module under checkpointing, in forward or in recomputation.

        Args:
            batch: its arguments.
            first_arguments: a list with the arguments for the first run, which may change lists and
                dicts among them. A recomputation has lists and dicts of its own.
            **more: for :meth:`run`.
        """
        # Later errors about a tensor that the module saved or changed name the module as a layer.
        layer.name, layer.kind = self.name, type(self.layers).__name__
        with inside():
            if not is_recomputing():
                # The checkpoint holds this list until backward: emptying it frees the arguments.
                args, kwargs = first_arguments.pop()
                return self.run(batch, call=lambda *_, **__: self.call(*args, **kwargs), **more)
            try:
                # Leaves, as a recomputation's inputs are, cannot change in place: kept() clones
                # them.
                return self.run(self.kept(batch), **more)
            finally:
                # An error of a recomputation gets a note that names the module. If ``layer.name``
                # were set, the note would name it twice.
                layer.name = None

    def kept(self, batch: Batch) -> Batch:
        """Keep the arguments for a later run: as clones, if this run may change them in place."""
        others = batch.others
        if any(isinstance(x, list | dict) for x in others.values()):
            # Flattening has copied lists and dicts, but none whose class pytree does not know.
            others = {k: copy(x) if isinstance(x, list | dict) else x for k, x in others.items()}
            batch = batch.copy()
            batch.structures = {VALUE: Structure(batch.structures[VALUE].spec, others)}
        if not self.changes_input:
            return batch
        return batch.map(lambda *xs: [x.clone() for x in xs], [VALUE])
