"""Failures of one process, which end the step of all others, and name it.

A process that waits for a message from one that has failed would wait for the timeout of the group,
half an hour. Nobody can end a wait of the gloo backend from outside. But a wait that runs into a
timeout of its own closes the connection to that process, and ends all other waits for it, at both
ends. So whoever fails asks each of the others for something, waits for a millisecond, and so closes
all connections. Whoever waits for it raises, and does the same::

    process 3 fails       3 ✕ 0   3 ✕ 1   3 ✕ 2       process 2 waited for 3, and raises
    process 2 raises      2 ✕ 0   2 ✕ 1               process 1 waited for 2, and raises
    ...

The one that fails first writes down why, where all find it. A process that is killed writes
nothing, but the system closes its connections. Then the one that notices first writes who is lost.
"""

from __future__ import annotations

import datetime
import os
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from torchgpipe._torch import pipelining
from torchgpipe.ambient.notes import entries, is_noted
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.peers import Peers

__all__: list[str] = []

#: How long a process that fails later than another one waits for the text of the first failure.
PATIENCE = datetime.timedelta(seconds=5)

#: The most characters that other processes are sent of an error's text, and of each note on it.
LONGEST = 10_000

#: The tag of receives that nobody answers: they run into a timeout, which closes a connection.
NOBODY = 1_000_002


class shared_failures:
    """Make the other processes raise, too, if a ``with`` block raises.

    Raises:
        RuntimeError: another process has failed before; the message names it, and says why. Or this
            one was forked.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def __enter__(self) -> None:
        if self._peers.process != os.getpid():
            raise RuntimeError(
                "a pipeline over several processes computes in those that made it, since a process "
                f"that is forked has no connections of its own (made by: {self._peers.process}, "
                f"forked: {os.getpid()}); use its layers there, without the pipeline"
            )
        if self._peers.failure:
            raise RuntimeError(
                "after a step that has failed, processes are no longer connected (failure: "
                f"{self._peers.failure}); start all processes again, from the last checkpoint"
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        peers = self._peers
        known, peers.known = peers.known, None
        if error is None or error is known:
            return
        first, why = _first_failure(peers, error)
        peers.failure = why
        if not first:
            raise RuntimeError(
                f"another process of the pipeline has failed ({why}); start all processes again, "
                "from the last checkpoint"
            ) from error
        if isinstance(error, Exception) and _is_connection(error):
            raise RuntimeError(
                f"a process of the pipeline is lost ({why}); look for what has killed it, and "
                "start all processes again, from the last checkpoint"
            ) from error


def _first_failure(peers: Peers, error: BaseException) -> tuple[bool, str]:
    """Whether nobody has failed before, and the text of the first failure."""
    lost = _is_connection(error)
    text = f"rank {peers.rank}: {error_text(error)}"
    try:
        store = pipelining.default_store()
        first = store.add(f"{peers.name} failures", 1) == 1
        if first:
            if lost:
                text = _lost(_close(peers), peers)
            store.set(f"{peers.name} failure", text)
            _close(peers)
            return True, text
        store.wait([f"{peers.name} failure"], PATIENCE)
        first_text: bytes = store.get(f"{peers.name} failure")
        _close(peers)
        return False, first_text.decode()
    except Exception:
        # The process that had torch.distributed's store is lost, most often rank 0. Others may have
        # ended because of that, and closed their connections, too. So the error names only the
        # lowest rank among those with closed connections.
        closed = _close(peers)
        return True, _lost(closed[:1], peers) if lost else text


def _close(peers: Peers) -> list[int]:
    """Close the connections to all other processes; return those that are closed already."""
    closed = set()
    for rank in range(peers.size):
        if rank == peers.rank:
            continue
        try:
            nothing = torch.empty(1, device=CPU)
            work: Any = dist.irecv(nothing, group=peers.group, group_src=rank, tag=NOBODY)
            work.wait(datetime.timedelta(milliseconds=1))
        except Exception as error:
            if _is_closed(error):
                closed.add(rank)
    if peers.device.type != "cpu":
        # Messages on an accelerator would wait for the other processes, and abort() ends them.
        with suppress(Exception):
            group: Any = peers.group
            group.abort()
    return sorted(closed)


def error_text(error: BaseException) -> str:
    """An exception and its notes as a text that any process can be sent, whatever they are."""
    texts = map(_text, [error, *entries(error, "__notes__")])
    return f"{type(error).__name__}: {', '.join(texts)}"


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception as raised:
        text = f"(its text raises {type(raised).__name__})"
    # A text may be very long, or have surrogates, which cannot be encoded.
    return text[:LONGEST].encode(errors="backslashreplace").decode()


def _lost(closed: list[int], peers: Peers) -> str:
    if not closed:
        return f"rank {peers.rank} has lost its connection to another process"
    names = ", ".join(f"rank {rank}" for rank in closed)
    return f"{names}: killed, or cut off (noticed by rank {peers.rank})"


def _is_closed(error: BaseException) -> bool:
    """Whether the process at the other end has closed a connection."""
    text = _text(error)
    return "closed by peer" in text or "reset by peer" in text or "Broken pipe" in text


def _is_connection(error: BaseException) -> bool:
    """Whether an exception comes from a connection, and not from the code of this process."""
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    # An error that bears our note comes from a layer, which may have connections of its own.
    return not is_noted(error) and (_is_closed(error) or "caused pair closure" in _text(error))
