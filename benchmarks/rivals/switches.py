"""Switches for the four parts of the method, to see what each of them brings.

dependency
    Fork and join, which hold backward to the order of the schedule, and which make a recomputation
    begin before its gradient comes.
streams
    Copy streams. Without them, copies run on the compute streams.
portals
    Skips that go straight from device to device. Without portals, each partition between hands a
    skip on (:mod:`benchmarks.rivals.carried`).
lanes
    Copies and forks that belong to copy streams in autograd's eyes. Without lanes they belong to
    the compute streams, as in torchgpipe 0.0.7, and autograd makes compute streams wait for each
    other.

Portals are switched off outside of the package. The three others patch private functions of the
engine, all of them in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.rivals.carried import carried
from torchgpipe import GPipe
from torchgpipe.autograd import copy
from torchgpipe.devices.streams import AbstractStream, PartitionStreams, Streams, use_stream
from torchgpipe.engine import cell
from torchgpipe.engine.lanes import Routes
from torchgpipe.engine.pipeline import Pipeline

__all__ = ["PARTS", "switched_off"]

PARTS = ("dependency", "streams", "portals", "lanes")


@contextmanager
def switched_off(parts: Collection[str]) -> Iterator[Callable[..., GPipe]]:
    """Switch parts off within a ``with`` block, for wrappers that are made in it.

    Yields:
        The class to wrap layers with, or a function that stands in for it.
    """
    with ExitStack() as stack:
        for part in parts:
            if part in PATCHES:
                stack.enter_context(PATCHES[part]())
        yield wrapped_without_portals if "portals" in parts else GPipe


def wrapped_without_portals(layers: nn.Sequential, balance: list[int], **options: Any) -> GPipe:
    """A wrapper whose partitions hand skips on."""
    return GPipe(carried(layers, balance), [1] * len(balance), **options)


@contextmanager
def without_dependency() -> Iterator[None]:
    """Leave the order of backward to autograd."""
    original = Pipeline.__init__

    def init(self: Pipeline, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.fenced = False

    with patch.object(Pipeline, "__init__", init):
        yield


@contextmanager
def without_streams() -> Iterator[None]:
    """Run copies on the compute streams."""
    original = Streams.get

    def get(self: Streams, *arguments: Any, **options: Any) -> list[PartitionStreams]:
        found = original(self, *arguments, **options)
        return [PartitionStreams(x.compute, *[[x.compute] * len(x.values)] * 2) for x in found]

    with patch.object(Streams, "get", get):
        yield


#: The compute stream that each copy stream belongs to, while lanes are switched off.
_compute: dict[AbstractStream, AbstractStream] = {}


@contextmanager
def without_lanes() -> Iterator[None]:
    """Make copies and forks belong to the compute streams.

    Autograd then no longer makes copy streams and compute streams wait for each other, so the
    patched functions do, as 0.0.7 does.
    """
    init, moved = Routes.__init__, copy._moved

    def note(self: Routes, *arguments: Any) -> None:
        init(self, *arguments)
        for streams in self._streams:
            lanes = (*streams.values, *streams.skips)
            _compute.update(dict.fromkeys(lanes, streams.compute))

    def use_compute(stream: AbstractStream) -> use_stream:
        return use_stream(_compute.get(stream, stream))

    def move(
        tensors: Sequence[Any], source: AbstractStream, target: AbstractStream, other: Any
    ) -> tuple[Any, ...]:
        if torch._C._current_autograd_node() is None:
            with use_stream(target):
                return moved(tensors, source, target, other=other)
        # In backward, autograd has made the compute stream current.
        copy._hand_over(defined(tensors), _compute.get(source, source), source)
        with use_stream(source):
            found = moved(tensors, source, target, other=other)
        copy._hand_over(defined(found), target, _compute.get(target, target))
        return found

    with (
        patch.object(Routes, "__init__", note),
        patch.object(cell, "use_stream", use_compute),
        patch.object(copy, "_moved", move),
    ):
        yield
    _compute.clear()


def defined(gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """The gradients that are not None."""
    return [gradient for gradient in gradients if gradient is not None]


#: A context manager for each part that patches the engine.
PATCHES: dict[str, Callable[[], Any]] = {
    "dependency": without_dependency,
    "streams": without_streams,
    "lanes": without_lanes,
}
