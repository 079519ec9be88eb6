"""Streams: no-ops on the CPU, and what streams a partition gets."""

from dataclasses import dataclass

import pytest
import torch

from torchgpipe.devices import streams as stream
from torchgpipe.devices.streams import CPUStream, Streams

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


def test_a_sparse_tensor_is_recorded_by_its_parts():
    recorded = []

    class Part:
        def __init__(self, name):
            self.record_stream = lambda _: recorded.append(name)

    class Sparse:
        device, is_sparse = CPU, True

        def _indices(self):
            return Part("indices")

        def _values(self):
            return Part("values")

    stream.record_stream(Sparse(), torch.Stream(device="cpu"))
    assert recorded == ["indices", "values"]


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
    assert streams.get(DEVICE, 1, skips=False) == streams.get(DEVICE, 1, skips=False)
    assert pool["next"] == 16


@pytest.mark.parametrize("skips", [False, True])
def test_a_partition_alone_computes_where_the_caller_does(pool, skips):
    ((compute, values, others),) = Streams().get(DEVICE, 1, skips=skips)
    assert compute == pool["current"]
    assert len(set(values)) == len(values) == len(others) == 15
    assert set(values).isdisjoint(others) == skips


@pytest.mark.parametrize(
    ("partitions", "skips", "turns"), [(2, 0, 14), (4, 0, 6), (3, 1, 4), (8, 0, 2), (6, 1, 2)]
)
def test_partitions_on_one_device_share_no_stream(pool, partitions, skips, turns):
    found = Streams().get(DEVICE, partitions, skips=skips)
    streams = [x for s in found for x in (s.compute, *s.values, *(s.skips if skips else ()))]
    assert len(set(streams)) == len(streams) <= 32
    assert pool["current"] not in streams
    assert all(len(s.values) == len(s.skips) == turns for s in found)


def test_many_partitions_have_streams_that_alias(pool):
    found = Streams().get(DEVICE, 20, skips=True)
    assert len({s.compute for s in found}) == 20
    assert all(len(s.values) == len(s.skips) == 2 for s in found)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("partitions", [1, 4, 50])
def test_no_stream_is_the_callers_own_of_the_same_pool(pool, partitions, skips):
    streams = Streams()
    streams.get(DEVICE, partitions, skips=skips)
    for number in range(32):
        pool["current"] = FakeStream(number)
        found = streams.get(DEVICE, partitions, skips=skips)
        copies = [x for s in found for x in (*s.values, *(s.skips if skips else ()))]
        assert pool["current"] not in copies
        for s in found:
            assert (s.compute == pool["current"]) == (partitions == 1)
        if partitions < 50:
            assert len(set(copies)) == len(copies)


def test_streams_of_the_cpu_are_one():
    cpu = CPUStream(CPU)
    assert Streams().get(CPU, 2, skips=True) == [(cpu, [cpu] * 15, [cpu] * 15)] * 2
