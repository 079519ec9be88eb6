"""The pool: the streams that a partition gets."""

from dataclasses import dataclass

import pytest
import torch

from torchgpipe.devices import pool as pool_module
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import CPU, CPUStream


@dataclass(frozen=True)
class FakeStream:
    """A stream of a pool that goes round, as CUDA's pools do."""

    number: int


@pytest.fixture
def pool(monkeypatch):
    """A pool of 32 streams, with the next one and the caller's current one."""
    state = {"next": 0, "current": FakeStream(99)}

    def new_stream(device):
        state["next"] += 1
        return FakeStream(state["next"] % 32)

    monkeypatch.setattr(pool_module, "new_stream", new_stream)
    monkeypatch.setattr(pool_module, "current_stream", lambda device: state["current"])
    return state


DEVICE = torch.device("cuda", 0)


def test_streams_are_made_once(pool):
    streams = StreamPool()
    assert streams.get(DEVICE, 1, skips=False) == streams.get(DEVICE, 1, skips=False)
    assert pool["next"] == 16


@pytest.mark.parametrize("skips", [False, True])
def test_a_partition_alone_computes_where_the_caller_does(pool, skips):
    ((compute, values, others),) = StreamPool().get(DEVICE, 1, skips=skips)
    assert compute == pool["current"]
    assert len(set(values)) == len(values) == len(others) == 15
    assert set(values).isdisjoint(others) == skips


@pytest.mark.parametrize(
    ("partitions", "skips", "turns"), [(2, 0, 14), (4, 0, 6), (3, 1, 4), (8, 0, 2), (6, 1, 2)]
)
def test_partitions_on_one_device_share_no_stream(pool, partitions, skips, turns):
    found = StreamPool().get(DEVICE, partitions, skips=skips)
    streams = [x for s in found for x in (s.compute, *s.values, *(s.skips if skips else ()))]
    assert len(set(streams)) == len(streams) <= 32
    assert pool["current"] not in streams
    assert all(len(s.values) == len(s.skips) == turns for s in found)


def test_many_partitions_have_streams_that_alias(pool):
    found = StreamPool().get(DEVICE, 20, skips=True)
    assert len({s.compute for s in found}) == 20
    assert all(len(s.values) == len(s.skips) == 2 for s in found)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("partitions", [1, 4, 50])
def test_no_stream_is_the_callers_own_of_the_same_pool(pool, partitions, skips):
    streams = StreamPool()
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


def test_many_that_copy_go_round(pool):
    found = StreamPool().lanes(DEVICE, 4, 40, least=1)
    assert [len(x) for x in found] == [1] * 40
    # A pool of 32 has one for the caller, and four are taken.
    assert len({x for lane in found for x in lane}) == 27
    assert pool["next"] == 32


def test_streams_of_the_cpu_are_one():
    cpu = CPUStream(CPU)
    assert StreamPool().get(CPU, 2, skips=True) == [(cpu, [cpu] * 15, [cpu] * 15)] * 2
