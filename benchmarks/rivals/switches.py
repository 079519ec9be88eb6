"""Parts of the method, each of which can be switched off to see what it brings.

dependency
    Fork and join, which hold backward to the order of the schedule, and have a recomputation
    begin before its gradient comes.
streams
    The copy streams. Without them, copies are made on the streams of the layers.
lanes
    Copies and forks belong to the copy streams in autograd's eyes. Without that they belong to the
    streams of the layers, as those of torchgpipe 0.0.7 do, and autograd ties these to each other.

The fourth part, portals, is no affair of the package: see :mod:`benchmarks.rivals.carried`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from torchgpipe.autograd import copy
from torchgpipe.devices.streams import AbstractStream, PartitionStreams, Streams, use_stream
from torchgpipe.engine import cell
from torchgpipe.engine.lanes import Routes
from torchgpipe.engine.pipeline import Pipeline

__all__ = ["SWITCHES", "switched_off"]

#: The stream of the layers that a copy stream belongs to, while lanes are switched off.
_compute: dict[AbstractStream, AbstractStream] = {}


@contextmanager
def without_dependency() -> Iterator[None]:
    """Leaves the order of backward to autograd."""
    original = Pipeline.__init__

    def init(self: Pipeline, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.fenced = False

    with patch.object(Pipeline, "__init__", init):
        yield


@contextmanager
def without_streams() -> Iterator[None]:
    """Makes copies on the stream of the layers."""
    original = Streams.get

    def get(self: Streams, *arguments: Any, **options: Any) -> list[PartitionStreams]:
        found = original(self, *arguments, **options)
        return [PartitionStreams(x.compute, *[[x.compute] * len(x.values)] * 2) for x in found]

    with patch.object(Streams, "get", get):
        yield


@contextmanager
def without_lanes() -> Iterator[None]:
    """Has copies and forks belong to the streams of the layers.

    Whatever the copy streams and they have to wait for is then to be said, as in 0.0.7.
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
        # In backward, which runs on the stream of the layers then.
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
    """Those that are there."""
    return [gradient for gradient in gradients if gradient is not None]


#: What switches a part off within a ``with`` block. It acts upon wrappers, and until they are gone.
SWITCHES: dict[str, Callable[[], Any]] = {
    "dependency": without_dependency,
    "streams": without_streams,
    "lanes": without_lanes,
}


@contextmanager
def switched_off(parts: Collection[str]) -> Iterator[None]:
    """Switches several parts off within a ``with`` block."""
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(SWITCHES[part]())
        yield
