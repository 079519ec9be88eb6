"""Channels: messages between processes of one host on the CPU, through memory that both map.

::

    sender     tensor ── copy ──→ slot ── copy ──→ tensor     receiver

    pipes      "slot 3 is full"  ──→        ←──  "slot 3 is free"

Gloo, the backend of :mod:`torch.distributed` for the CPU, sends a message through the network,
which copies it twice, and has a thread in each process that takes it from there. Where both
processes compute, these threads wait for their turns (docs/decisions/across_processes.rst has the
figures). Here the system wakes the process that waits as soon as the other one has filled a slot.

A slot is a part of a file without a name, which has several of one size. Its sender passes the
file on once, by a socket, and fills a slot again each time that the receiver has emptied it. So a
channel keeps as much memory as messages of each size were on their way at once.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import struct
from collections import Counter, defaultdict
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.streams import CPU

if TYPE_CHECKING:
    from torchgpipe.distributed.peers import Peers

__all__: list[str] = []

#: What a pipe carries: the number of a slot that is full, with the tag of its message; or, as
#: ``~number``, that of one that is free again.
RECORD = struct.Struct("=ii")

#: The tag of the last record of a process, which closes its end.
CLOSED = -1

#: As many bytes of records are read at once.
AT_ONCE = 512 * RECORD.size

#: The least size of a slot, in bytes.
LEAST = 4096

#: The most slots that a file has, and the most bytes if it has several. A socket takes some 278
#: files that nobody has received yet, and each takes a descriptor, of which a process often has
#: 1024.
SLOTS, BYTES = 64, 1 << 26


class Incoming(NamedTuple):
    """A message that is on its way.

    Args:
        channel: where it comes.
        tensor: takes what it brings.
        key: the tag, and the message's number among those of its tag.
    """

    channel: Channel
    tensor: Tensor
    key: tuple[int, int]

    def wait(self) -> None:
        """Wait until the tensor has what was sent."""
        self.channel.take(self.tensor, self.key)


class Channel:
    """The two ways between this process and another one of the same host.

    Messages of a tag arrive in the order in which they were sent.

    Args:
        connection: a socket that is connected to the other process.
        patience: for how many seconds one process waits for the other.
        rank: the rank of the other process, for messages.
    """

    def __init__(self, connection: socket.socket, patience: float, rank: int) -> None:
        self._socket, self._process, self._rank = connection, os.getpid(), rank
        self._milliseconds = min(1000 * patience, 2**31 - 1)
        connection.settimeout(self._milliseconds / 1000)
        # A pipe holds thousands of records that nobody has read. A socket would hold hundreds, and
        # then make the sender wait.
        theirs, self._out = os.pipe()
        os.set_blocking(self._out, False)
        socket.send_fds(connection, [b"."], [theirs])
        os.close(theirs)
        self._in = -1
        self._readable, self._either = select.poll(), select.poll()
        #: The slots that this process fills, and those that the other one does, as bytes.
        self._own: list[Tensor] = []
        self._others: list[Tensor] = []
        #: The numbers of those of its own that are free, by size.
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        #: The slots with messages that nobody has taken yet, and how many have come, by tag.
        self._full: dict[tuple[int, int], int] = {}
        self._came: Counter[int] = Counter()
        #: How many messages were asked for, by tag.
        self._asked: Counter[int] = Counter()
        #: Whether the other process has closed its end.
        self._is_closed = False

    def open(self) -> None:
        """Wait until the other process has made its end."""
        _, self._in = self._file()
        os.set_blocking(self._in, False)
        self._readable.register(self._in, select.POLLIN)
        self._either.register(self._in, select.POLLIN)
        self._either.register(self._out, select.POLLOUT)

    def close(self) -> None:
        """Close the connection, so that the other process waits no longer."""
        # A process that was forked, and ends or lets go of the pipeline, closes none but its own
        # files.
        if self._process == os.getpid():
            # Processes that were forked, as those of a data loader, keep the pipe open, so that the
            # other process would see no end of it.
            with suppress(OSError):
                os.write(self._out, RECORD.pack(0, CLOSED))
        self._socket.close()
        for file in (self._in, self._out):
            if file >= 0:
                os.close(file)
        self._in = self._out = -1

    def is_closed(self) -> bool:
        """Whether the other process has closed its end."""
        with suppress(OSError):
            while self._read():
                pass
        return self._is_closed

    def send(self, tensor: Tensor, tag: int) -> None:
        """Send a tensor, whose memory may be changed after that."""
        number = self._find(tensor.nbytes)
        _seen_as(tensor, self._own[number]).copy_(tensor)
        self._tell(number, tag)

    def receive(self, tensor: Tensor, tag: int) -> Incoming:
        """Give the next message of a tag a tensor to fill; return what waits for it."""
        number = self._asked[tag]
        self._asked[tag] += 1
        return Incoming(self, tensor, (tag, number))

    def take(self, tensor: Tensor, key: tuple[int, int]) -> None:
        """Wait for a message, and copy it.

        Raises:
            ConnectionResetError: the other process is gone.
            TimeoutError: it sends nothing.
        """
        while key not in self._full:
            if not self._read():
                self._wait(self._readable)
        number = self._full.pop(key)
        tensor.copy_(_seen_as(tensor, self._others[number]))
        # Whoever has sent the last message of a pipeline may be gone.
        with suppress(ConnectionError):
            self._tell(~number, 0)

    def _find(self, size: int) -> int:
        """A slot that is free, and has so many bytes or a few more."""
        # Sizes are powers of two, so that a few kinds of slots do for all messages.
        size = max(LEAST, 1 << (size - 1).bit_length())
        # Those that are free again come before those that nobody has written yet.
        self._read()
        free = self._free[size]
        if not free:
            file = os.memfd_create("torchgpipe")
            # What is never written takes no memory.
            count = max(1, min(SLOTS, BYTES // size))
            os.ftruncate(file, count * size)
            socket.send_fds(self._socket, [bytes([count])], [file])
            free += range(len(self._own), len(self._own) + count)
            self._own += _slots_of(count, file)
        return free.pop()

    def _tell(self, number: int, tag: int) -> None:
        record = RECORD.pack(number, tag)
        while True:
            try:
                os.write(self._out, record)
                return
            except BlockingIOError:
                # The other process may wait for the same.
                self._wait(self._either)
                self._read()

    def _read(self) -> bool:
        """Read what the other process has told so far; return whether that was something."""
        if self._is_closed:
            raise ConnectionResetError("connection closed by peer")
        try:
            data = os.read(self._in, AT_ONCE)
        except BlockingIOError:
            return False
        self._is_closed = not data
        for number, tag in RECORD.iter_unpack(data):
            if tag == CLOSED:
                self._is_closed = True
                break
            if number < 0:
                self._free[len(self._own[~number])].append(~number)
                continue
            while number >= len(self._others):
                self._others += _slots_of(*self._file())
            self._full[tag, self._came[tag]] = number
            self._came[tag] += 1
        return True

    def _file(self) -> tuple[int, int]:
        """The next file that the other process has passed on, after how many slots it has."""
        data, files, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not data:
            raise ConnectionResetError("connection closed by peer")
        return data[0], files[0]

    def _wait(self, events: select.poll) -> None:
        if not events.poll(self._milliseconds):
            seconds = self._milliseconds / 1000
            raise TimeoutError(f"no message from rank {self._rank} within {seconds:g} s")


def connected(peers: Peers, patience: float) -> dict[int, Channel]:
    """Make channels to the other processes of this host, if there are any, by rank.

    All processes of a pipeline call it. It makes none where their device has links of its own, nor
    without Linux.

    Args:
        peers: the processes.
        patience: for how many seconds one process waits for another.
    """
    # Others on this host may see the name, but not what proves that one of us has come by it.
    name, proof = token_hex(16), token_hex(16)
    door = _opened(name, peers.size) if peers.device == CPU else None
    if door is None:
        peers.texts("")
        peers.texts("")
        return {}
    found: dict[int, socket.socket] = {}
    with door:
        told = [text.split() for text in peers.texts(f"{name} {proof}")]
        for rank in range(peers.rank):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(_address(told[rank][0]))
                connection.sendall(proof.encode())
                found[rank] = connection
            except (OSError, IndexError):
                # It is on another host, or has another device.
                connection.close()
        # After this, each process that could connect has done so.
        came = [text.split() for text in peers.texts(" ".join(map(str, found)))]
        proofs = {told[k][1]: k for k, ranks in enumerate(came) if str(peers.rank) in ranks}
        while proofs:
            connection, _ = door.accept()
            connection.settimeout(patience)
            rank = proofs.pop(connection.recv(len(proof)).decode(errors="replace"), -1)
            if rank < 0:
                connection.close()
            else:
                found[rank] = connection
    channels = {rank: Channel(connection, patience, rank) for rank, connection in found.items()}
    for channel in channels.values():
        channel.open()
    return channels


def _opened(name: str, size: int) -> socket.socket | None:
    """A socket that others of this host connect to by a name; None if this process has none."""
    try:
        if signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL:
            # A message to a process that is gone would end this one, and raise no error.
            return None
        os.close(os.memfd_create(name))
        door = socket.socket(socket.AF_UNIX)
        door.bind(_address(name))
        door.listen(size)
    except (AttributeError, OSError):
        # It is not Linux, or forbids this.
        return None
    return door


def _address(name: str) -> str:
    """The address of a name, which is in no folder, and gone with its process."""
    return f"\0torchgpipe {name}"


def _slots_of(count: int, file: int) -> tuple[Tensor, ...]:
    """The slots of a file, as bytes; the file is closed."""
    memory = mmap.mmap(file, os.fstat(file).st_size)
    os.close(file)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, -1).unbind()


def _seen_as(tensor: Tensor, slot: Tensor) -> Tensor:
    """The beginning of a slot, as a tensor like another one."""
    return slot[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
