"""Races: accesses that are reported, and accesses that a wait orders."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races
from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.testing import Stream, observe

ACCESSES = [
    ("read after write", lambda x: x.fill_(2), "fill_", lambda x: x.neg(), "neg"),
    ("write after read", lambda x: x.neg(), "neg", lambda x: x.fill_(2), "fill_"),
    ("write after write", lambda x: x.zero_(), "zero_", lambda x: x.fill_(2), "fill_"),
    ("write after write", lambda x: x.mul_(2), "mul", lambda x: x.add_(2), "add"),
]
KINDS = ["raw", "war", "waw", "in-place"]


@pytest.mark.parametrize(("kind", "first", "name1", "second", "name2"), ACCESSES, ids=KINDS)
def test_unordered(devices, kind, first, name1, second, name2):
    x = one(devices[3])
    s, t = new_streams(devices[3], 2)
    with observe() as seen:
        with s:
            first(x)
        with t:
            second(x)
    (race,) = seen.races
    assert (race.kind, race.device, race.bytes, race.count) == (kind, 3, 16, 1)
    assert (race.first.op, race.first.stream) == (name1, place(s))
    assert (race.second.op, race.second.stream) == (name2, place(t))
    assert race.first.write == (kind != "write after read")
    assert race.second.write == (kind != "read after write")
    text = str(race)
    assert text.index(f"{name1} ") < text.index(f"{name2} ")
    assert f"on {place(s)}" in text
    assert kind in text


def wait_stream(s, t, x):
    t.wait_stream(s)


def event_wait(s, t, x):
    t.wait_event(s.record_event())


def synchronize_stream(s, t, x):
    s.synchronize()


def synchronize_event(s, t, x):
    s.record_event().synchronize()


def synchronize_device(s, t, x):
    torch.accelerator.synchronize(x.device)


def item(s, t, x):
    with s:
        x[0].item()


def cpu(s, t, x):
    with s:
        x.cpu()


def third_stream(s, t, x):
    u = torch.Stream(device="virtual:5")
    u.wait_stream(s)
    t.wait_stream(u)


ORDERS = [
    wait_stream,
    event_wait,
    synchronize_stream,
    synchronize_event,
    synchronize_device,
    item,
    cpu,
    third_stream,
]


@pytest.mark.parametrize(("kind", "first", "name1", "second", "name2"), ACCESSES, ids=KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_ordered(devices, order, kind, first, name1, second, name2):
    x = one(devices[1])
    s, t = new_streams(devices[1], 2)
    with observe() as seen:
        with s:
            first(x)
        order(s, t, x)
        with t:
            second(x)
    assert_no_races(seen)


@pytest.mark.parametrize("order", ORDERS)
def test_wait_that_comes_too_early(devices, order):
    x = one(devices[1])
    s, t = new_streams(devices[1], 2)
    with observe() as seen:
        order(s, t, x)
        with s:
            x.fill_(1)
        with t:
            read(x)
    assert [race.kind for race in seen.races] == ["read after write"]


def test_copy_between_devices_is_ordered_with_current_streams(devices):
    x = one(devices[0])
    with observe() as seen:
        x.add_(1)
        y = x.to(devices[1])
        y.add_(1)
        # On the side of the source only its current stream has come after the copy.
        x.add_(1)
    assert_no_races(seen)


def test_copy_between_devices_is_not_ordered_with_other_streams(devices):
    x = one(devices[0])
    s, t = torch.Stream(device=devices[0]), torch.Stream(device=devices[1])
    with observe() as seen:
        y = x.to(devices[1])
        with t:
            read(y)
        with s:
            x.fill_(1)
    copied = [(race.kind, race.first.op, race.first.stream) for race in seen.races]
    # Copies run on the source's stream.
    assert copied == [
        ("read after write", "copy_", Stream(0, 0)),
        ("write after read", "copy_", Stream(0, 0)),
    ]
    assert [race.device for race in seen.races] == [1, 0]


# Each: two functions of a tensor of 8 elements, and whether they race on two streams.
RANGES = [
    (lambda x: x[:4].fill_(1), lambda x: x[4:].fill_(1), False),
    (lambda x: x[:5].fill_(1), lambda x: x[4:].fill_(1), True),
    (lambda x: x[4:].fill_(1), lambda x: read(x[:4]), False),
    (lambda x: x[:4].fill_(1), lambda x: read(x.view(2, 4)[0]), True),
    (lambda x: x.view(4, 2)[:2].t().add_(1), lambda x: read(x[4:]), False),
    (lambda x: torch.neg(x[:4], out=x[4:]), lambda x: x[:4].fill_(1), True),
    (lambda x: torch.neg(x[:4], out=x[4:]), lambda x: read(x[:4]), False),
    (lambda x: torch.neg(x[:4], out=x[4:]), lambda x: read(x[4:]), True),
    (lambda x: x[3:3].fill_(1), lambda x: x.fill_(1), False),
    # A view reads nothing.
    (lambda x: x.view(2, 4).t()[0].detach(), lambda x: x.fill_(1), False),
]


@pytest.mark.parametrize(("first", "second", "races"), RANGES)
def test_bytes_of_a_storage(devices, first, second, races):
    x = one(devices[0], 8)
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        with s:
            first(x)
        with t:
            second(x)
    assert len(seen.races) == races


def test_repeated_races_are_counted(devices):
    x = one(devices[0])
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        for _ in range(5):
            with s:
                x.fill_(1)
            with t:
                read(x)
    assert Counter({race.kind: race.count for race in seen.races}) == {
        "read after write": 5,
        "write after read": 4,
    }
    assert "5 times" in str(seen.races[0])


def test_autograd_orders_streams(devices):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(devices[0])
    s, t = new_streams(devices[0], 2)
    with observe(raise_on_race=True) as seen:
        x = torch.ones(3, 4, device=devices[0], requires_grad=True)
        s.wait_stream(torch.accelerator.current_stream(devices[0]))
        with s:
            y = layers(x)
        t.wait_stream(s)
        y.record_stream(t)
        with t:
            loss = (y * 2).sum()
        torch.accelerator.current_stream(devices[0]).wait_stream(t)
        loss.record_stream(torch.accelerator.current_stream(devices[0]))
        loss.backward()
        x.grad.add_(1)
    assert_no_races(seen)
