"""A mini-batch of any wrapper: the checks before its step, and the settings restored after it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import prepare_if_compiled, watch
from torchgpipe.ambient.context import SavedSettings
from torchgpipe.ambient.modes import verify_no_tangents, verify_no_transform
from torchgpipe.ambient.nesting import is_within_cell
from torchgpipe.autograd.versions import unchanged
from torchgpipe.batchnorm import deferred_updates
from torchgpipe.engine.wrapper import Wrapper
from torchgpipe.partition.keeping import Keeping, checkpointed, keepings_of, recomputed_by
from torchgpipe.values.division import division_of, split
from torchgpipe.values.microbatch import VALUE, Batch, in_all, joined

__all__: list[str] = []

Result = TypeVar("Result")


def verify_call(wrapper: Wrapper, tensors: Iterable[Tensor]) -> None:
    """Check that a wrapper can be called here and now, and prepare for compiled layers.

    Args:
        wrapper: the wrapper.
        tensors: those of the input.

    Raises:
        RuntimeError: a :mod:`torch.func` transform or forward-mode differentiation is active.
    """
    watch(wrapper, is_within_cell)
    verify_no_transform()
    verify_no_tangents(chain(tensors, wrapper.parameters(), wrapper.buffers()))


def compute(step: Callable[[], Result], wrapper: Wrapper, whole: Sequence[Tensor]) -> Result:
    """Compute the micro-batches of a mini-batch.

    Args:
        step: computes them.
        wrapper: the wrapper, whose deferred norms update their statistics if nothing fails.
        whole: the tensors that every micro-batch gets.

    Raises:
        RuntimeError: a layer changed in place a tensor that every micro-batch gets.
    """
    _, devices = wrapper._traced()
    # guard: what is interrupted
    with SavedSettings(devices), deferred_updates(wrapper._norms), unchanged(whole):
        found = step()
    # The first layer to be compiled in this process may have been compiled here.
    prepare_if_compiled()
    return found


class MiniBatch:
    """A mini-batch that a wrapper was called with, divided into micro-batches.

    Args:
        wrapper: the wrapper.
        input: the mini-batch: see :func:`~torchgpipe.values.division.division_of`.
        recorded: whether it trains, so that cells are checkpointed.

    Raises:
        TypeError, ValueError, RuntimeError: it cannot be divided, or not be computed here and now.
    """

    def __init__(self, wrapper: Wrapper, input: Any, recorded: bool) -> None:
        wrapper._begin()
        verify_no_transform()
        self.wrapper, self.recorded = wrapper, recorded
        self.division = division = division_of(input, wrapper.chunks)
        #: The micro-batches. A step replaces each by its output.
        self.batches = batches = [Batch(part) for part in split(input, division)]
        self.m = division.m
        #: The micro-batches to check: all if the caller made them, else one that stands for all.
        different = batches if division.is_given else batches[:1]
        verify_call(wrapper, chain.from_iterable(different))
        if not batches[0].atomic:
            wrapper._traps.lists(input, self.m)
        if entrance := wrapper._entrance:
            device, what, name = entrance
            for x in chain.from_iterable(different):
                if x.device != device:
                    raise ValueError(
                        f"the input must be on the device of the first {what} (first {what}: "
                        f"{device}, input: {x.device}); pass input.to({name})"
                    )
        if recorded:
            # Rows may be too few for the micro-batches that the caller wants.
            asked = self.m if division.is_given else wrapper.chunks
            wrapper._traps.no_pipelining(wrapper._width, asked)
        #: The tensors that every micro-batch gets.
        self.whole = in_all(batches)
        self._shapes = batches[0].shapes

    @property
    def checkpointed(self) -> list[int]:
        """For each partition, how many micro-batches, from the first, are checkpointed."""
        m = self.m if self.recorded else 0
        return [checkpointed(recomputed_by(mode), m) for mode in self.modes]

    @property
    def modes(self) -> tuple[Keeping, ...]:
        """The checkpoint mode of each partition, in a step that trains."""
        modes = self.wrapper._checkpoint if self.recorded else "never"
        return keepings_of(modes, self.wrapper._partition_count or 1)

    def map(self, function: Callable[..., Iterable[Tensor]]) -> None:
        """Replace the tensors of each micro-batch by a function of them."""
        self.batches = [batch.map(function, [VALUE]) for batch in self.batches]
        self.whole = in_all(self.batches)

    def compute(self, step: Callable[[], None]) -> None:
        """Compute the micro-batches: see :func:`compute`."""
        compute(step, self.wrapper, self.whole)

    def warn_of_coupled(self, *outputs: Sequence[torch.Size]) -> None:
        """Warn if outputs compare rows, as the shapes of the first and the last output show."""
        wrapper = self.wrapper
        wrapper._traps.coupled(outputs, self.division.rows, self._shapes, wrapper.parameters())

    def joined(self, blocks: Container[int]) -> Any:
        """Join the outputs of all micro-batches.

        Args:
            blocks: the places of tensors with several rows for each row, block by block.
        """
        found = joined(self.batches, self.division, blocks)
        self.warn_of_coupled(self.batches[0].shapes, self.batches[-1].shapes)
        return found
