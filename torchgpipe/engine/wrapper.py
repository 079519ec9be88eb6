"""The base of the wrappers: their settings, and the attributes that each process makes anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import mark_if_possible
from torchgpipe.batchnorm import deferred_batch_norms
from torchgpipe.engine.recorded import Holder
from torchgpipe.partition.arguments import checked_chunks
from torchgpipe.partition.keeping import Keeping, Keepings, checked_keepings
from torchgpipe.partition.traps import Traps

__all__: list[str] = []


class Alone(nn.Module):
    """A module with attributes that are not copied or pickled, but made anew."""

    #: The names of these attributes.
    _own: ClassVar[tuple[str, ...]]

    def _prepare(self) -> None:
        """Make these attributes."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()


class Wrapper(Alone):
    """A module that computes its layers micro-batch by micro-batch.

    The constructor of a wrapper calls :meth:`_set`, moves the layers to their devices, and calls
    :meth:`_wrapped`.
    """

    _own: ClassVar[tuple[str, ...]] = ("_process", "_norms")
    _chunks: int
    _checkpoint: Keepings

    def __setattr__(self, name: str, value: Any) -> None:
        found = getattr(type(self), name, None)
        if isinstance(value, nn.Module) and isinstance(found, property):
            # nn.Module would register a module, and not call the setter, which refuses it.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _set(self, module: nn.Module, chunks: int, checkpoint: Keeping | Sequence[Keeping]) -> None:
        """Check and store the settings, and take over the training flag of a module."""
        self._chunks = checked_chunks(chunks)
        self.checkpoint = checkpoint
        self.training = module.training

    def _wrapped(self, name: str) -> None:
        """Finish the construction of any wrapper, once its layers are on their devices.

        Args:
            name: the name of its class in warnings.
        """
        self._traps = Traps(name)
        self._rechunked()
        self._prepare()

    def _prepare(self) -> None:
        mark_if_possible()
        self._process = os.getpid()
        self._norms = deferred_batch_norms(nn.ModuleList([self, *self._layers]))

    @property
    def _layers(self) -> Iterable[nn.Module]:
        """The layers, in the order in which they run."""
        raise NotImplementedError

    @property
    def _partition_count(self) -> int | None:
        """The number of partitions; None if all of the model has one checkpoint mode."""
        raise NotImplementedError

    def _traced(self) -> tuple[Holder, Sequence[torch.device]]:
        """The object that holds the spans of a trace, and the devices."""
        raise NotImplementedError

    @property
    def _width(self) -> int:
        """The number of devices that may be busy at the same time."""
        return len(self._traced()[1])

    @property
    def _entrance(self) -> tuple[torch.device, str, str] | None:
        """The device of the inputs, what is on it, and how users name it; None for any device."""
        return None

    def _verify(self) -> None:
        """Check that the layers are still on their devices."""

    def _begin(self) -> None:
        """Make sure that the layers can be computed here and now."""
        if self._process != os.getpid():
            # Neither threads nor streams survive a fork, and a lock may be held for good.
            self._prepare()
        self._verify()

    @property
    def chunks(self) -> int:
        """The number of micro-batches that a mini-batch is split into, if it has as many rows."""
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._chunks = checked_chunks(chunks)
        self._rechunked()

    def _rechunked(self) -> None:
        """Take note of another number of micro-batches."""
        self._traps.sequence_first(self._layers, self._chunks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The .to(device), .cuda() and the like of this module, and of a parent, call this.
        _, devices = self._traced()
        for device in dict.fromkeys(devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise moving_denied()
        return super()._apply(fn, recurse)

    @property
    def checkpoint(self) -> Keeping | list[Keeping]:
        """The checkpoint mode: ``always``, ``except_last``, ``never`` or ``offload``.

        It may also be an :class:`~torchgpipe.Offload`, or a list with a mode for each partition. To
        change one of these, assign a new list.
        """
        # A new list, so that changes of it do not change the setting unchecked.
        return [*self._checkpoint] if isinstance(self._checkpoint, tuple) else self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Keeping | Sequence[Keeping]) -> None:
        self._checkpoint = checked_keepings(checkpoint, self._partition_count)

    def extra_repr(self) -> str:
        """The settings, for the first line of ``repr()``."""
        return f"chunks={self.chunks}, checkpoint={self.checkpoint!r}"


def moving_denied() -> TypeError:
    """The error for an attempt to move a wrapper."""
    return TypeError(
        "the layers of a wrapper must stay on their devices, so it cannot be moved; move the model "
        "before wrapping it, or wrap it anew with other devices"
    )
