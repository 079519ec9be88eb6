"""Streams: no-ops on the CPU, and what streams a partition gets."""

from dataclasses import dataclass

import pytest
import torch

from torchgpipe import stream
from torchgpipe.stream import CPUStream, Streams

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


@dataclass(frozen=True)
class FakeStream:
    """A stream of a pool that goes round, as those of CUDA do."""

    number: int


@pytest.fixture
def pool(monkeypatch):
    """A pool of 32 streams: which one is next, and the caller's current one."""
    state = {"next": 0, "current": FakeStream(99)}

    def new_stream(device):
        state["next"] += 1
        return FakeStream(state["next"] % 32)

    monkeypatch.setattr(stream, "new_stream", new_stream)
    monkeypatch.setattr(stream, "current_stream", lambda device: state["current"])
    return state


DEVICE = torch.device("cuda", 0)


def test_streams_are_made_once(pool):
    streams = Streams()
    assert streams.get(DEVICE, 1) == streams.get(DEVICE, 1)
    assert pool["next"] == 16


def test_a_partition_alone_computes_where_the_caller_does(pool):
    ((compute, copies),) = Streams().get(DEVICE, 1)
    assert compute == pool["current"]
    assert len(set(copies)) == len(copies) == 16


@pytest.mark.parametrize("partitions", [2, 3, 4, 8, 10])
def test_partitions_on_one_device_share_no_stream(pool, partitions):
    found = [s for compute, copies in Streams().get(DEVICE, partitions) for s in (compute, *copies)]
    assert len(set(found)) == len(found) <= 32
    assert len(found) >= 3 * partitions
    assert pool["current"] not in found


def test_many_partitions_have_streams_that_alias(pool):
    found = Streams().get(DEVICE, 20)
    assert len({compute for compute, _ in found}) == 20
    assert all(len(copies) == 2 for _, copies in found)


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("number", range(1, 32, 5))
def test_no_stream_is_the_callers_own_of_the_same_pool(pool, partitions, number):
    streams = Streams()
    streams.get(DEVICE, partitions)
    pool["current"] = FakeStream(number)
    for compute, copies in streams.get(DEVICE, partitions):
        assert pool["current"] not in copies
        assert (compute == pool["current"]) == (partitions == 1)


def test_streams_of_the_cpu_are_one():
    cpu = CPUStream(CPU)
    assert Streams().get(CPU, 2) == [(cpu, [cpu] * 16)] * 2
