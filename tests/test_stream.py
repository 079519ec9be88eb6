"""Streams: no-ops on the CPU, and the choice of copy streams."""

import pytest
import torch

from torchgpipe import stream
from torchgpipe.stream import CopyStreams, CPUStream

CPU = torch.device("cpu")
NO_ACCELERATOR = not stream.accelerators()


def test_cpu_stream_is_one():
    assert stream.new_stream(CPU) == stream.current_stream(CPU) == CPUStream(CPU)
    assert stream.get_device(CPUStream(CPU)) == CPU


def test_cpu_operations_do_nothing():
    x = torch.zeros(1)
    with stream.use_stream(CPUStream(CPU)), stream.use_device(CPU):
        stream.wait_stream(CPUStream(CPU), CPUStream(CPU))
        stream.record_stream(x, CPUStream(CPU))


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu", 3)])
def test_canonical_cpu(name):
    assert stream.canonical_device(name) == CPU == torch.zeros(1, device="cpu").device


@pytest.mark.skipif(not NO_ACCELERATOR, reason="there is an accelerator")
def test_no_accelerators():
    assert stream.accelerators() == []
    assert stream.device_types()[0] == "cpu"


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_accelerators():
    first = stream.accelerators()[0]
    assert torch.zeros(1, device=first).device == first
    assert stream.canonical_device(first.type) in stream.accelerators()
    assert stream.canonical_device(0) == first
    assert stream.device_types() == ("cpu", first.type)


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_use_stream_nests_and_restores():
    device = stream.accelerators()[0]
    before = stream.current_stream(device)
    one, two = stream.new_stream(device), stream.new_stream(device)
    with stream.use_stream(one):
        with stream.use_stream(two), stream.use_stream(one):
            assert stream.current_stream(device) == one
        assert stream.current_stream(device) == one
    assert stream.current_stream(device) == before


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_wait_between_cpu_and_accelerator():
    device = stream.accelerators()[0]
    x = torch.zeros(1, device=device)
    stream.wait_stream(stream.current_stream(device), CPUStream(CPU))
    stream.wait_stream(CPUStream(CPU), stream.current_stream(device))
    stream.record_stream(x, stream.new_stream(device))
    stream.record_stream(torch.zeros(1), stream.new_stream(device))


class FakeStream:
    """A stream of a pool that goes round, as those of CUDA do."""

    def __init__(self, number):
        self.device, self.number = torch.device("cuda", 0), number

    def __eq__(self, other):
        return self.number == other.number


@pytest.fixture
def pool(monkeypatch):
    """The next number of a pool of four streams, in a list to be changed."""
    state = [0]

    def new_stream(device):
        state[0] += 1
        return FakeStream(state[0] % 4)

    monkeypatch.setattr(stream, "new_stream", new_stream)
    return state


def test_copy_streams_are_made_once(pool):
    streams, compute = CopyStreams(), FakeStream(99)
    made = [streams.get(i, compute) for i in range(4)]
    assert [streams.get(i, compute) for i in range(4)] == made
    assert pool == [4]


@pytest.mark.parametrize("number", range(4))
def test_copy_stream_is_never_the_compute_stream(pool, number):
    streams = CopyStreams()
    for i in range(9):
        assert streams.get(i, FakeStream(99)).number in range(4)
    for i in range(9):
        # The caller comes back with a stream of its own, from the same pool.
        assert streams.get(i, FakeStream(number)).number != number


def test_cpu_copy_stream_is_the_stream():
    assert CopyStreams().get(0, CPUStream(CPU)) == CPUStream(CPU)
