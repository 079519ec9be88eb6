"""The base of the wrappers: their settings, and a mini-batch with the checks before its step."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import mark_if_possible, prepare_if_compiled, watch
from torchgpipe.ambient.context import Modes, SavedSettings
from torchgpipe.ambient.generators import is_within_cell
from torchgpipe.ambient.modes import verify_no_tangents, verify_no_transform
from torchgpipe.autograd.versions import unchanged
from torchgpipe.batchnorm import deferred_batch_norms, deferred_updates
from torchgpipe.engine.recorded import Holder
from torchgpipe.partition.arguments import Traps, checked_chunks, verify_filled
from torchgpipe.partition.keeping import (
    Keeping,
    Keepings,
    checked_keepings,
    keepings_of,
)
from torchgpipe.recompute.once import begin, state_of, updated_in, updates, warn_of_changes
from torchgpipe.values.division import FlatInput
from torchgpipe.values.marks import tensors_in
from torchgpipe.values.microbatch import VALUE, Batch, joined

__all__: list[str] = []


class MadeAnew(nn.Module):
    """A module with attributes that are not copied or pickled, but made anew."""

    #: The names of the attributes that :meth:`_prepare` makes anew in a copy.
    _own: ClassVar[tuple[str, ...]]

    def _prepare(self) -> None:
        """Make these attributes."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in self._own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prepare()


class Wrapper(MadeAnew):
    """A module that computes its layers micro-batch by micro-batch.

    The constructor of a wrapper calls :meth:`_set`, moves the layers to their devices, and calls
    :meth:`_wrapped`.
    """

    _own: ClassVar[tuple[str, ...]] = ("_process", "_norms", "_updated")
    _chunks: int
    _checkpoint: Keepings

    def __setattr__(self, name: str, value: Any) -> None:
        attribute = getattr(type(self), name, None)
        if isinstance(value, nn.Module) and isinstance(attribute, property):
            # nn.Module would register the value as a child. The property's setter refuses it.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _set(self, module: nn.Module, chunks: int, checkpoint: Keeping | Sequence[Keeping]) -> None:
        """Check and store the settings, and take over the training flag of a module."""
        self._chunks = checked_chunks(chunks)
        self.checkpoint = checkpoint
        self.training = module.training

    def _wrapped(self, name: str) -> None:
        """Finish the construction of a class of wrappers, once the layers are on their devices."""
        self._traps = Traps(name)
        self._rechunked()
        self._prepare()

    def _prepare(self) -> None:
        mark_if_possible()
        self._process = os.getpid()
        layers = nn.ModuleList([self, *self._layers])
        self._norms, self._updated = deferred_batch_norms(layers), updated_in(layers)

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
            # After a fork, threads and streams are gone, and a lock may be held for good.
            self._prepare()
        if is_within_cell():
            raise RuntimeError(
                "a wrapped model must not be called by a layer of another one, or by its loss, "
                f"since both divide the mini-batch (called: {type(self).__name__}); give the "
                "layers of both to one wrapper, or call this one outside"
            )
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
        self._traps.seen = False
        self._traps.sequence_first(self._layers, self._chunks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # .to(device), .cuda() and the like call _apply(), also those of a module around this one.
        # They must not move layers; changing their dtype is fine.
        _, devices = self._traced()
        for device in dict.fromkeys(devices):
            if fn(torch.empty(0, device=device)).device != device:
                raise moving_denied()
        return super()._apply(fn, recurse)

    @property
    def checkpoint(self) -> Keeping | list[Keeping]:
        """The mode: what backward computes again. To change one of a list, assign a new list."""
        # A new list, since changes within the list would not be checked.
        return [*self._checkpoint] if isinstance(self._checkpoint, tuple) else self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Keeping | Sequence[Keeping]) -> None:
        self._checkpoint = checked_keepings(checkpoint, self._partition_count)

    def extra_repr(self) -> str:
        """The settings, for the first line of ``repr()``."""
        devices = [str(device) for device in self._traced()[1]]
        return f"devices={devices}, chunks={self.chunks}, checkpoint={self.checkpoint!r}"


def moving_denied() -> TypeError:
    """The error for an attempt to move a wrapper."""
    return TypeError(
        "the layers of a wrapper must stay on their devices, so it cannot be moved; move the model "
        "before wrapping it, or wrap it anew with other devices"
    )


Result = TypeVar("Result")


def verify_call(wrapper: Wrapper, tensors: Iterable[Tensor]) -> None:
    """Check that a wrapper can be called here and now, and prepare for compiled layers.

    Raises:
        RuntimeError: forward-mode differentiation is active.
    """
    watch(wrapper, is_within_cell)
    verify_no_tangents(chain(tensors, wrapper.parameters(), wrapper.buffers()))


def begin_mini_batch(wrapper: Wrapper, loss: Any = None) -> None:
    """Have layers, also of the loss, update their state before a step takes note of parameters."""
    begin([*wrapper._updated, *updated_in(loss)])


def compute(
    step: Callable[[], Result],
    wrapper: Wrapper,
    whole: Sequence[Tensor],
    modes: Modes | None = None,
    m: int = 1,
    loss: Any = None,
) -> Result:
    """Compute the micro-batches of a mini-batch.

    Raises:
        RuntimeError: a layer changed in place a tensor that every micro-batch gets.
    """
    _, devices = wrapper._traced()
    layers = [*wrapper._updated, *updated_in(loss)]
    looks = (
        m > 1 and wrapper.training and torch.is_grad_enabled() and not wrapper._traps.knows_state
    )
    before = state_of(wrapper, loss) if looks else {}
    with (
        # guard: what is interrupted
        SavedSettings(devices, modes),
        deferred_updates(wrapper._norms),
        updates(layers, m),
        unchanged(whole),
    ):
        result = step()
        if looks:
            wrapper._traps.knows_state = True
            warn_of_changes(before, wrapper, loss, m)
    # If the step has compiled a layer, PyTorch's compiler needs other settings in later steps.
    prepare_if_compiled()
    return result


class MiniBatch:
    """A mini-batch that a wrapper was called with, divided into micro-batches.

    Raises:
        TypeError, ValueError, RuntimeError: it cannot be divided, or not be computed here and now.
    """

    def __init__(self, wrapper: Wrapper, input: Any, loss: Any = None) -> None:
        wrapper._begin()
        verify_no_transform()
        self.wrapper, self.loss = wrapper, loss
        #: The input as a list of leaves, which the division and all checks read.
        self.flat = flat = FlatInput(input)
        self.division = division = flat.division(wrapper.chunks)
        #: The micro-batches. Both kinds of GPipe put outputs here; a schedule empties the list.
        self.batches = batches = [Batch(leaves, flat.spec) for leaves in flat.parts(division)]
        self.m = division.m
        tensors = [x for leaf in flat.leaves for x in tensors_in(leaf)]
        verify_call(wrapper, tensors)
        wrapper._traps.lists(flat, self.m)
        if entrance := wrapper._entrance:
            device, what, name = entrance
            for x in tensors:
                if x.device != device:
                    raise ValueError(
                        f"the input must be on the device of the first {what} (first {what}: "
                        f"{device}, input: {x.device}); pass input.to({name})"
                    )
        devices = wrapper._traced()[1]
        for x in tensors:
            verify_filled(x, "input", devices)
        if wrapper.training and torch.is_grad_enabled():
            wrapper._traps.idle(wrapper._width, division)
        #: The tensors that each of several micro-batches gets whole: no layer may change them.
        self.whole = _in_all(batches)
        self._shapes = batches[0].shapes

    @property
    def modes(self) -> tuple[Keeping, ...]:
        """The checkpoint mode of each partition: ``never`` where autograd records nothing."""
        modes = self.wrapper._checkpoint if torch.is_grad_enabled() else "never"
        return keepings_of(modes, self.wrapper._partition_count or 1)

    def map(self, function: Callable[..., Iterable[Tensor]]) -> None:
        """Replace the tensors of each micro-batch by a function of them."""
        self.batches = [batch.map(function, [VALUE]) for batch in self.batches]
        self.whole = _in_all(self.batches)

    def compute(self, step: Callable[[], None]) -> None:
        """Compute the micro-batches: see :func:`compute`."""
        compute(step, self.wrapper, self.whole, m=self.m, loss=self.loss)

    def warn_of_coupled(self, *outputs: Sequence[torch.Size]) -> None:
        """Warn if outputs compare rows, as the shapes of the first and the last output show."""
        wrapper = self.wrapper
        wrapper._traps.coupled(outputs, self.division.rows, self._shapes, wrapper.parameters())

    def joined(self, blocks: Container[int]) -> Any:
        """Join the outputs of all micro-batches.

        Args:
            blocks: the places of tensors with several rows for each row, block by block.
        """
        output = joined(self.batches, self.division, blocks)
        self.warn_of_coupled(self.batches[0].shapes, self.batches[-1].shapes)
        return output


def _in_all(batches: Sequence[Batch]) -> list[Tensor]:
    """The tensors that are in all micro-batches, if there are several micro-batches."""
    others = {id(tensor) for batch in batches[1:2] for tensor in batch}
    return [tensor for tensor in batches[0] if id(tensor) in others]
