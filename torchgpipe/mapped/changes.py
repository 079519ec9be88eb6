"""Changes of the model's state by its own code, such as a running mean that its root keeps.

Micro-batches change it one after another, each on the stream of the stage that it has reached. A
later visit of a device has another stream, which does not wait for the first one. So whatever uses
changed state next waits for an event after the change.

Mapped modules are called on one stream each, or see to it themselves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    record,
    wait_for,
    wait_stream,
)
from torchgpipe.values.structure import is_dense

__all__: list[str] = []


class Changes:
    """The changes of the state of a model in one step.

    Args:
        model: the model. It is not held, since the graph of a step may hold this.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._own: set[int] | None = None
        #: The last change of each storage.
        self._events: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether anything was changed."""
        return bool(self._events)

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that are state of the model, or views of it."""
        # A tensor with a ``grad_fn`` was computed from state, and is no state.
        tensors = [x for x in tensors if x.grad_fn is None and is_dense(x)]
        if tensors and self._own is None:
            model = self._model()
            state = [] if model is None else [*model.parameters(), *model.buffers()]
            self._own = {_storage(x) for x in state if is_dense(x)}
        return [x for x in tensors if self._own and _storage(x) in self._own]

    def wait(self, tensors: Iterable[Tensor], stream: AbstractStream | None = None) -> None:
        """Make the streams that use tensors next wait for changes of these.

        Args:
            tensors: any tensors.
            stream: the stream; by default the current one of each tensor's device.
        """
        for x in tensors if self._events else ():
            event = self._events.get(_storage(x)) if is_dense(x) else None
            if event is not None:
                # guard: changes of state
                wait_for(stream or current_stream(x.device), event)

    def begin(
        self,
        state: Iterable[Tensor],
        streams: Callable[[torch.device], Iterable[AbstractStream]],
    ) -> None:
        """Make the streams that change state next wait for all that may use it.

        Args:
            state: the state.
            streams: returns the streams that compute on a device.
        """
        for device in {x.device for x in state}:
            own = current_stream(device)
            for other in streams(device):
                if other != own:
                    # guard: state in use
                    wait_stream(own, other)

    def end(self, state: Iterable[Tensor]) -> None:
        """Take note that state was changed."""
        for x in state:
            event = record(current_stream(x.device))
            if event is not None:
                self._events[_storage(x)] = event


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
