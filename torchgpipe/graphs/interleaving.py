"""The streams of two computations of one worker that are interleaved.

::

    stream of a   a1 ──╮        ╭── a2 ──╮
    beside             ├─ copy ─│────────╯         arithmetic takes turns,
    stream of b        ╰── b1 ──╯                  a copy or collective runs beside it

Two computations that run at the same time on one device share its arithmetic, so neither is faster
than in turns. A copy, or a collective, needs none. So it runs on a stream of its own, and a
computation waits before it uses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchgpipe.ambient import labels
from torchgpipe.devices.streams import (
    AbstractStream,
    make_current,
    record,
    record_stream,
    use_stream,
    wait_for,
    wait_stream,
)

__all__: list[str] = []


class Interleaving:
    """The streams of two computations.

    Args:
        streams: the stream of each computation, which may be one stream.
        beside: the stream of their communication.
        own: the label of each computation; None without an observation.
    """

    def __init__(
        self,
        streams: tuple[AbstractStream, AbstractStream],
        beside: AbstractStream,
        own: Sequence[labels.Label | None] = (None, None),
    ) -> None:
        self._streams, self._beside, self._labels = streams, beside, own
        self._last: AbstractStream | None = None

    def turn(self, k: int) -> None:
        """Let computation ``k`` go on, after the work that the other one has issued."""
        stream = self._streams[k]
        if self._last is not None and self._last != stream:
            # guard: arithmetic takes turns
            wait_stream(stream, self._last)
        make_current(stream)
        self._last = stream
        if self._labels[k] is not None:
            labels.put(self._labels[k])

    def send(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> tuple[Any, Any]:
        """Call a function that communicates; return its result, and the event behind it."""
        beside = self._beside
        assert self._last is not None
        # guard: communication after what it sends
        wait_stream(beside, self._last)
        for x in _tensors([*args, *kwargs.values()]):
            # guard: recording what is communicated
            record_stream(x, beside)
        with use_stream(beside):
            result = function(*args, **kwargs)
        return result, record(beside)

    def receive(self, message: tuple[Any, Any]) -> Any:
        """Make the computing stream wait for a communication; return the result of this."""
        assert self._last is not None
        result, event = message
        if event is not None:
            # guard: waiting for communication
            wait_for(self._last, event)
            for x in _tensors([result]):
                # guard: recording the result of communication
                record_stream(x, self._last)
        return result


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)
