"""Failures of one process: the others end soon, and name it."""

import os
import re
import signal
import time

import pytest
import torch
from torch import nn

from tests.distributed.test_messages import (
    changed_in_place,
    changed_object,
    differing,
    skip_changed_in_place,
    unsendable,
)
from tests.distributed.test_schedules import pipe_of
from tests.support.schedules import linear
from tests.support.size import SOAK

#: Seconds within which the others end.
SOON = 10


class Failing(nn.Module):
    """A layer that fails in its third micro-batch, in forward or in backward."""

    def __init__(self, how):
        super().__init__()
        self.how, self.count = how, 0

    def fail(self, *_):
        if "kill" in self.how:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("no such token")

    def forward(self, x):
        self.count += 1
        if self.count == 3 and "forward" in self.how:
            self.fail()
        if self.count == 3 and "backward" in self.how:
            x.register_hook(self.fail)
        return x * 1


@pytest.mark.parametrize(
    ("case", "arguments", "expected"),
    [
        (
            differing,
            ["number"],
            r"same structure and.*batch: 1, announced: value of shapes .*\);",
        ),
        (changed_object, [], "announced: value .*, sent: value"),
        (differing, ["shape"], r"announced once.*\(2, 6\).*\(2, 12\)"),
        (unsendable, [], "pickle takes.*plain numbers"),
        (changed_in_place, [], "views of one tensor"),
        (skip_changed_in_place, [], "views of one tensor"),
    ],
)
def test_messages_that_are_wrong(case, arguments, expected, processes):
    found = processes.run(case, 2, *arguments)
    processes.stop()
    for text in found:
        assert re.search(expected, text)


def fail(group, rank, how, name):
    """Fail in one process; return what is raised, and after how many seconds."""
    stages = 4
    layers = [nn.Sequential(linear(), Failing(how if j == rank else "")) for j in range(stages)]
    pipe = pipe_of(layers, name, group, chunks=4)
    x = torch.rand(2, 8, 6)
    began = time.monotonic()
    with pytest.raises((RuntimeError, KeyError)) as found:
        pipe.step(*x)
    took = time.monotonic() - began
    with pytest.raises(RuntimeError, match="start all processes again"):
        pipe.step(*x)
    notes = getattr(found.value, "__notes__", [])
    return type(found.value).__name__, " ".join([str(found.value), *notes]), took


class UnsayableError(Exception):
    """An exception with notes of which no other process can be told as they are."""

    def __init__(self):
        super().__init__()
        self.__notes__ = [3, "\udc80", self]

    def __str__(self):
        raise ValueError


def fail_unsayably(group, how):
    """Fail in the first process, in a way that cannot be told; return what is raised."""

    def fail(*_):
        raise KeyboardInterrupt if how == "interrupt" else UnsayableError

    pipe = pipe_of([linear(), linear()], "1f1b", group, chunks=2)
    if pipe.is_first and how == "interrupt":
        pipe._reader.read = fail
    elif pipe.is_first:
        next(pipe.children()).forward = fail
    began = time.monotonic()
    with pytest.raises((RuntimeError, KeyboardInterrupt, UnsayableError)) as found:
        pipe.step(*torch.rand(2, 4, 6))
    assert time.monotonic() - began < SOON
    return "" if pipe.is_first else str(found.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("interrupt", "KeyboardInterrupt"),
        ("text", r"UnsayableError: .* ValueError\), 3, \\udc80, .* 0F0"),
    ],
)
def test_process_that_fails_unsayably(how, text, processes):
    found = processes.run(fail_unsayably, 2, how)
    processes.stop()
    assert re.search(rf"rank 0: {text}", found[1])


NAMES = ("1f1b", "fill_drain", "zbh1", "1f1b")

#: For each process that fails a schedule, and whether it fails in forward or in backward.
FAILURES = [
    (rank, name, how)
    for rank in range(4)
    for name in dict.fromkeys(NAMES)
    for how in ("forward", "backward")
    if SOAK or (name == NAMES[rank] and (how == "forward") == (rank in (0, 3)))
]


@pytest.mark.full
@pytest.mark.parametrize(("rank", "name", "how"), FAILURES)
def test_process_that_raises(rank, name, how, processes):
    found = processes.run(fail, 4, rank, how, name)
    processes.stop()
    for k, (kind, text, took) in enumerate(found):
        assert took < SOON
        assert "no such token" in text
        assert f"on rank {rank}" in text
        assert (kind == "KeyError") == (k == rank)


@pytest.mark.full
@pytest.mark.parametrize(("rank", "name", "how"), FAILURES)
def test_process_that_is_killed(rank, name, how, processes):
    outcomes = processes.outcomes(fail, 4, rank, f"kill in {how}", name)
    processes.stop()
    for k, (error, value) in enumerate(outcomes):
        if k == rank:
            assert error == f"rank {rank} ended: -9"
        else:
            assert not error
            assert f"rank {rank}: killed" in value[1]
            assert value[2] < SOON
