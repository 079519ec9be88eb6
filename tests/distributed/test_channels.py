"""Channels: what is sent arrives as it was, in memory that is used again, without a deadlock."""

import fcntl
import gc
import os
import signal
import socket
import threading
from contextlib import contextmanager

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.distributed.processes import TIMEOUT
from tests.distributed.test_schedules import pipe_of
from tests.support.schedules import linear
from torchgpipe._torch import pipelining
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.channels import LEAST, RECORD, Channel, connected

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="channels need Linux")

#: In how many seconds a wait is taken to hang.
PATIENCE = 20.0

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]

messages = st.builds(
    lambda shape, dtype, tag, number: (torch.full(shape, number).to(dtype), tag),
    st.lists(st.integers(1, 40), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 2),
    st.integers(0, 9),
)


@contextmanager
def pair(patience=PATIENCE):
    """Both ends of a channel."""
    ends = [Channel(x, patience, 1 - k) for k, x in enumerate(socket.socketpair())]
    for end in ends:
        end.open()
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


@pytest.fixture
def ends():
    with pair() as found:
        yield found


@given(st.lists(messages, max_size=12), st.randoms())
def test_there_in_any_order(sent, random):
    with pair() as (one, other):
        check(one, other, sent, random)


def check(one, other, sent, random):
    waiting = []
    for tensor, tag in sent:
        if random.random() < 0.5:
            one.send(tensor, tag)
            waiting.append((other.receive(torch.empty_like(tensor), tag), tensor))
        else:
            waiting.append((other.receive(torch.empty_like(tensor), tag), tensor))
            one.send(tensor, tag)
    random.shuffle(waiting)
    for arrival, tensor in waiting:
        arrival.wait()
        assert torch.equal(arrival.tensor, tensor)


def test_strided_tensors_and_views(ends):
    one, other = ends
    x = torch.rand(4, 6)
    for y in (x.t(), x[:, :2], x[0, 0], x[:1].expand(3, 6)):
        one.send(y, 0)
        arrival = other.receive(torch.empty(y.shape), 0)
        arrival.wait()
        assert torch.equal(arrival.tensor, y)


def test_what_is_sent_may_change(ends):
    one, other = ends
    x = torch.ones(3)
    one.send(x, 0)
    x.zero_()
    arrival = other.receive(torch.empty(3), 0)
    arrival.wait()
    assert arrival.tensor.sum() == 3


def test_slots_are_used_again(ends):
    one, other = ends
    numbers = set()
    for size in (10, 3000, 10, 2000, 3000):
        for _ in range(3):
            arrivals = []
            for _ in range(2):
                one.send(torch.ones(size), 0)
                arrivals.append(other.receive(torch.empty(size), 0))
            assert other._read()
            numbers.update(other._full.values())
            for arrival in arrivals:
                arrival.wait()
    # Two of each size are on their way at once.
    sizes = sorted(len(one._own[number]) for number in numbers)
    assert sizes == [LEAST, LEAST, 2 * LEAST, 2 * LEAST, 4 * LEAST, 4 * LEAST]


def test_more_on_their_way_than_a_socket_takes_files(ends):
    """Nobody reads meanwhile, as where a receiver waits for somebody else."""
    one, other = ends
    count, before = 1000, len(os.listdir("/proc/self/fd"))
    for number in range(count):
        one.send(torch.tensor(number), 0)
    # Both ends are in this process.
    arrivals = [other.receive(torch.tensor(-1), 0) for _ in range(count)]
    for arrival in arrivals:
        arrival.wait()
    assert [int(x.tensor) for x in arrivals] == [*range(count)]
    assert len(os.listdir("/proc/self/fd")) - before < 40


def test_large_slots(ends, monkeypatch):
    """A file has few of them, since a process may have a limit of addresses, too."""
    one, other = ends
    monkeypatch.setattr("torchgpipe.distributed.channels.BYTES", 2 * LEAST)
    for size in (LEAST, 4 * LEAST):
        for number in range(3):
            one.send(torch.full((size,), number, dtype=torch.uint8), 0)
        for number in range(3):
            arrival = other.receive(torch.empty(size, dtype=torch.uint8), 0)
            arrival.wait()
            assert torch.equal(arrival.tensor, torch.full_like(arrival.tensor, number))
    assert [len(x) for x in one._own] == [LEAST] * 4 + [4 * LEAST] * 3


def test_many_at_once(ends):
    """Both send more messages than a pipe holds before either takes what the other has sent."""
    count = 1000
    for end in ends:
        # Which is 512 records.
        fcntl.fcntl(end._out, fcntl.F_SETPIPE_SZ, 4096)

    def run(k):
        for number in range(count):
            ends[k].send(torch.tensor(number), 0)
        for number in range(count):
            arrival = ends[k].receive(torch.tensor(-1), 0)
            arrival.wait()
            assert arrival.tensor == number
        done.append(k)
        # The other one also tells which slots are free, and has as many records of that.
        while threads[1 - k].is_alive() and len(done) < 2:
            ends[k].is_closed()

    done = []
    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]


def test_a_process_that_is_gone(ends):
    one, other = ends
    one.send(torch.ones(2), 0)
    one.close()
    arrivals = [other.receive(torch.empty(2), 0) for _ in range(2)]
    arrivals[0].wait()
    with pytest.raises(ConnectionError, match="closed by peer"):
        arrivals[1].wait()
    with pytest.raises(ConnectionError):
        other.send(torch.ones(2), 0)


def test_a_process_that_is_killed(ends):
    """The system closes its files, and nobody says so."""
    one, other = ends
    one.send(torch.ones(2), 0)
    for file in (one._out, one._in):
        # The end is closed once more after the test.
        os.dup2(one._socket.fileno(), file)
    arrivals = [other.receive(torch.empty(2), 0) for _ in range(2)]
    arrivals[0].wait()
    with pytest.raises(ConnectionError, match="closed by peer"):
        arrivals[1].wait()
    assert other.is_closed()


def test_a_closed_end_that_a_forked_process_has_still(ends):
    one, other = ends
    one.send(torch.ones(2), 0)
    kept = os.dup(one._out)
    one.close()
    arrivals = [other.receive(torch.empty(2), 0) for _ in range(2)]
    arrivals[0].wait()
    with pytest.raises(ConnectionError, match="closed by peer"):
        arrivals[1].wait()
    os.close(kept)


def test_a_forked_process_that_ends(ends):
    """The parent's finalizers run there, too."""
    one, other = ends
    child = os.fork()
    if not child:
        try:
            one.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    one.send(torch.ones(2), 0)
    arrival = other.receive(torch.empty(2), 0)
    arrival.wait()
    assert arrival.tensor.sum() == 2


def test_nothing_stays_open():
    before = os.listdir("/proc/self/fd")
    with pair() as (one, other):
        one.send(torch.ones(2), 0)
        other.receive(torch.empty(2), 0).wait()
    del one, other
    assert os.listdir("/proc/self/fd") == before


def test_another_process_that_makes_no_end():
    mine, theirs = socket.socketpair()
    one = Channel(mine, 0.01, 1)
    with pytest.raises(TimeoutError):
        one.open()
    theirs.recv(1)
    theirs.close()
    with pytest.raises(ConnectionError, match="closed by peer"):
        one.open()
    one.close()


def test_a_system_that_forbids_channels(monkeypatch):
    def forbid(name):
        raise PermissionError

    monkeypatch.setattr(os, "memfd_create", forbid)
    assert meet(Texts(2)) == [{}, {}]


def test_a_process_that_ends_where_nobody_reads():
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        assert meet(Texts(2)) == [{}, {}]
    finally:
        signal.signal(signal.SIGPIPE, before)


def test_a_process_that_sends_nothing():
    with (
        pair(patience=0.01) as (_, other),
        pytest.raises(TimeoutError, match="rank 0 within 0.01 s"),
    ):
        other.receive(torch.empty(2), 0).wait()


def test_a_pipe_that_is_full():
    """The sender waits until the receiver reads."""
    with pair(patience=0.01) as (one, other):
        one.send(torch.ones(1), 0)
        with pytest.raises(TimeoutError):
            while True:
                one._tell(0, 0)
        assert other._read()
        one._tell(0, 0)


def test_both_pipes_are_full():
    """A process that waits reads what comes meanwhile, so that the other one can go on."""
    with pair(patience=0.01) as both:
        for end in both:
            end.send(torch.ones(1), 0)
        for end in both:
            with pytest.raises(BlockingIOError):
                while True:
                    os.write(end._out, RECORD.pack(0, 0))
        one, other = both
        with pytest.raises(TimeoutError):
            one._tell(0, 0)
        other._tell(0, 0)


class Texts:
    """Threads that :func:`connected` takes for the processes of a pipeline."""

    def __init__(self, size, device=lambda rank: CPU):
        self.size, self.device_of = size, device
        self.barrier, self.told = threading.Barrier(size), [None] * size

    def at(self, rank):
        found = object.__new__(Texts)
        found.__dict__.update(self.__dict__, rank=rank, device=self.device_of(rank))
        return found

    def texts(self, text):
        self.told[self.rank] = text
        self.barrier.wait(PATIENCE)
        found = [*self.told]
        self.barrier.wait(PATIENCE)
        return found


def meet(peers):
    """The channels of all processes."""
    found = [None] * peers.size

    def run(rank):
        found[rank] = connected(peers.at(rank), PATIENCE)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(peers.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def close(found):
    for channels in found:
        for channel in channels.values():
            channel.close()


def test_all_of_a_host_are_connected():
    found = meet(Texts(3))
    assert [sorted(x) for x in found] == [[1, 2], [0, 2], [0, 1]]
    for rank, channels in enumerate(found):
        for other, channel in channels.items():
            channel.send(torch.tensor([rank, other]), 7)
    for rank, channels in enumerate(found):
        for other, channel in channels.items():
            arrival = channel.receive(torch.empty(2, dtype=torch.int64), 7)
            arrival.wait()
            assert arrival.tensor.tolist() == [other, rank]
    close(found)


def test_some_have_another_device():
    found = meet(Texts(3, lambda rank: torch.device("meta") if rank == 1 else CPU))
    assert [sorted(x) for x in found] == [[2], [], [0]]
    close(found)


def test_another_host(monkeypatch):
    """A name that leads nowhere, as on another host."""

    class Far(Texts):
        def texts(self, text):
            found = super().texts(text)
            return ["elsewhere " + x.split()[1] if " " in x else x for x in found]

        def at(self, rank):
            found = super().at(rank)
            found.__class__ = Far
            return found

    assert meet(Far(2)) == [{}, {}]


def test_a_stranger_is_turned_away():
    """Somebody else of this host connects first, and has no proof."""
    strangers = []

    class Watched(Texts):
        def texts(self, text):
            if self.rank == 1 and not strangers:
                found = super().texts(text)
                stranger = socket.socket(socket.AF_UNIX)
                stranger.connect(f"\0torchgpipe {found[0].split()[0]}")
                stranger.sendall(b"?" * 32)
                strangers.append(stranger)
                return found
            return super().texts(text)

        def at(self, rank):
            found = super().at(rank)
            found.__class__ = Watched
            return found

    one, other = meet(Watched(2))
    assert [*one] == [1]
    assert [*other] == [0]
    assert strangers[0].recv(1) == b""
    strangers[0].close()
    close([one, other])


def of_pipelines(group):
    """Check that a pipeline has channels to all of its processes, and lets go of them."""
    pipe = pipe_of([linear(), linear()], "1f1b", group, chunks=2)
    channels = pipe._peers.channels
    assert [*channels] == [1 - pipe._peers.rank]
    pipe.step(*torch.rand(2, 4, 6))
    assert channels[1 - pipe._peers.rank]._own
    (closed,) = channels.values()
    del pipe, channels
    gc.collect()
    assert closed._socket.fileno() == -1


def test_pipelines(processes):
    processes.run(of_pipelines, 2)


def patience(group):
    return pipelining.patience_of(torch.distributed.group.WORLD)


def test_patience(processes):
    assert processes.run(patience, 2) == [TIMEOUT] * 2
