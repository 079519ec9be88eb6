"""Observations: their beginning, their end, and their other properties."""

import threading
from math import inf, nan

import pytest
import torch

from tests.support.helpers import assert_no_races
from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.testing import Stream, observe


def test_raise_on_race(devices):
    x = one(devices[0])
    s, t = new_streams(devices[0], 2)
    with (
        pytest.raises(RuntimeError, match=r"race: write after read: add on .* after use on"),
        observe(raise_on_race=True) as seen,
    ):
        with s:
            read(x, "use")
        with t:
            x.add_(1)
        pytest.fail("it did not raise")
    # The operator did nothing, and did not count as an access.
    assert x.tolist() == [1, 1, 1, 1]
    assert [(race.kind, race.count) for race in seen.races] == [("write after read", 1)]
    with observe(raise_on_race=True) as seen, s:
        read(x)
        x.add_(1)
    assert_no_races(seen)


class Racy(torch.autograd.Function):
    """A function whose backward writes memory that the caller's stream reads."""

    @staticmethod
    def forward(ctx, x, y, stream):
        ctx.y, ctx.stream = y, stream
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with ctx.stream:
            ctx.y.fill_(1)
        return grad, None, None


def test_raise_on_race_in_backward(devices):
    x, y = one(devices[1]).requires_grad_(), one(devices[1])
    with observe(raise_on_race=True) as seen:
        z = Racy.apply(x, y, torch.Stream(device=devices[1]))
        read(y, "use")
        with pytest.raises(RuntimeError, match=r"fill_ on stream .* after use on stream 0"):
            z.sum().backward()
    assert len(seen.races) == 1
    with observe(raise_on_race=True) as seen:
        (x * 2).sum().backward()
    assert_no_races(seen)
    assert x.grad.tolist() == [2, 2, 2, 2]


def test_stacks(devices):
    x = one(devices[0])
    with observe(stacks=True) as seen:
        with torch.Stream(device=devices[0]):
            x.fill_(1)  # The first.
        for _ in range(2):
            x.add_(1)  # The second.
    (race,) = [race for race in seen.races if race.second.op == "add"]
    for access, what in (race.first, "The first."), (race.second, "The second."):
        assert access.stack[-1].startswith(f"{__file__}:")
        assert access.stack[-1].endswith(what)
        assert "test_stacks" in access.stack[-1]
        assert access.stack[-1] in str(race)
    with observe() as seen:
        with torch.Stream(device=devices[0]):
            x.fill_(1)
        read(x)
    assert seen.races[0].first.stack == ()


def test_races_of_several_places_are_told_apart_by_their_stacks(devices):
    x = one(devices[0])
    s, t = new_streams(devices[0], 2)

    def race():
        with s:
            x.fill_(1)
        with t:
            read(x)
        torch.accelerator.synchronize(x.device)

    for stacks, counts in (False, [2]), (True, [1, 1]):
        with observe(stacks=stacks) as seen:
            race()
            race()
        assert [race.count for race in seen.races] == counts


def test_stacks_in_threads_of_autograd(devices):
    x, y = one(devices[1]).requires_grad_(), one(devices[1])
    with observe(stacks=True) as seen:
        z = Racy.apply(x, y, torch.Stream(device=devices[1]))
        read(y)
        z.sum().backward()
    (race,) = seen.races
    assert "in backward: ctx.y.fill_(1)" in race.second.stack[-1]


def test_observation_after_its_end(devices):
    x = one(devices[0])
    with observe(costs={"fill_": 1.0}) as seen:
        with torch.Stream(device=devices[0]):
            x.fill_(1)
        read(x)
        before = (seen.races, seen.spans, seen.transfers, seen.makespan)
    x.fill_(1)
    with observe(costs={"fill_": 1.0}):
        x.fill_(1)
        x.cpu()
        assert (seen.races, seen.spans, seen.transfers, seen.makespan) == before
    assert len(seen.races) == len(seen.spans) == 1


def test_one_observation_at_a_time(devices):
    with observe() as seen:
        with (
            pytest.raises(RuntimeError, match="one observation at a time; end the other"),
            observe(),
        ):
            pass
        x = one(devices[0])
        with torch.Stream(device=devices[0]):
            x.fill_(1)
        read(x)
    assert len(seen.races) == 1


def test_operators_of_other_threads_are_seen(devices):
    x, s = one(devices[0]), torch.Stream(device=devices[0])

    def work():
        with s:
            x.fill_(1)

    with observe(jitter=1) as seen:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        read(x)
    assert [(race.first.stream, race.second.stream) for race in seen.races] == [
        (place(s), Stream(0, 0))
    ]


#: By argument: values that are wrong.
WRONG = {
    "costs": ("x", 3, [], {1: 1}, {"addmm": "x"}, {"addmm": nan}, {"addmm": 10**400})
    + ({"addmm": -1.0}, {"adm": 1.0}, {"to": 1.0}, {"clone": 1.0}, {"_foreach_add": 1.0}),
    "host": (None, "x", -1, nan, inf, True, []),
    "bandwidth": ("x", 3, [], {(0, 1): "x"}, {(0, 1): nan}, {(0, 10**30): 1}, {(0, 0.5): 1})
    + ({(0, 1): 0}, {(0, 8): 1}, {("gpu", 0): 1}, {"cpu": 1}, {(0,): 1})
    + ({((0, 8), "cpu"): 1}, {((), "cpu"): 1}),
    "jitter": ("x", -1, nan, 1.5, True, 10**30, []),
    "raise_on_race": (None, "x", nan, []),
    "stacks": (None, "x", nan, []),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_that_are_wrong(name, devices):
    text = r"(?s)\(.*: .*\).*; "
    for value in WRONG[name]:
        with pytest.raises((TypeError, ValueError), match=text), observe(**{name: value}):
            pass
    with observe() as seen:
        pass
    for path in (None, 3, b"x", ""):
        with pytest.raises((TypeError, ValueError), match=text):
            seen.save_trace(path)
