"""Pinned memory: copies from and to it race as those of devices do, and nobody waits for them."""

import pytest
import torch

from tests.support.helpers import assert_no_races
from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.testing import observe


def pinned(size=4):
    return torch.empty(size, pin_memory=True)


def test_a_copy_back_must_wait_for_the_copy_out(devices):
    x, buffer = one(devices[1]), pinned()
    out, back = new_streams(devices[1], 2)
    with observe() as seen:
        with out:
            buffer.copy_(x, non_blocking=True)
        with back:
            x.copy_(buffer, non_blocking=True)
    kinds = {(race.kind, race.device, race.bytes) for race in seen.races}
    assert kinds == {("read after write", "cpu", 16), ("write after read", 1, 16)}
    (race,) = [race for race in seen.races if race.device == "cpu"]
    assert (race.first.stream, race.second.stream) == (place(out), place(back))
    assert "read after write (16 bytes of pinned memory, 1 times)" in str(race)


def test_devices_share_a_buffer(devices):
    x, y, buffer = one(devices[0]), one(devices[1]), pinned()
    with observe() as seen:
        buffer.copy_(x, non_blocking=True)
        y.copy_(buffer, non_blocking=True)
    (race,) = seen.races
    assert (race.first.stream.device, race.second.stream.device) == (0, 1)


ORDERS = {
    "an event": lambda s, t: t.wait_event(s.record_event()),
    "the host": lambda s, t: s.synchronize(),
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_ordered(devices, order):
    x, buffer = one(devices[0]), pinned()
    out, back = new_streams(devices[0], 2)
    with observe() as seen:
        with out:
            buffer.copy_(x, non_blocking=True)
        order(out, back)
        with back:
            x.copy_(buffer, non_blocking=True)
    assert_no_races(seen)


def test_rows_of_one_buffer_are_apart(devices):
    x, buffer = one(devices[0]), pinned((2, 4))
    one_stream, other = new_streams(devices[0], 2)
    with observe() as seen:
        with one_stream:
            buffer[0].copy_(x, non_blocking=True)
        with other:
            buffer[1].copy_(x, non_blocking=True)
    assert_no_races(seen)


@pytest.mark.parametrize("kind", ["pinned", "a part", "not pinned"])
def test_the_host_waits_for_copies_of_other_memory_alone(devices, kind):
    x, y = one(devices[0]), one(devices[1])
    target = {"pinned": pinned(), "a part": pinned(6)[2:], "not pinned": torch.empty(4)}[kind]
    with observe(bandwidth={(0, "cpu"): 1.0}) as seen:
        target.copy_(x, non_blocking=True)
        read(y, cost=1.0)
    assert seen.spans[1].start == (16.0 if kind == "not pinned" else 0.0)
