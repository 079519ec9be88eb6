"""Workers: their context, their results and exceptions, and their end."""

import threading
import time
from functools import partial
from unittest import TestCase

import pytest
import torch

from tests.support.helpers import CPUS
from torchgpipe.ambient.context import Context
from torchgpipe.engine.workers import PATIENCE, Task, Workers

A, B, C = CPUS[:3]


def run(workers, *tasks):
    workers.run([Task(k, *task) for k, task in enumerate(tasks)], Context())


def raiser(error):
    def task():
        raise error

    return task


class Clock:
    """A stand-in for the host's clock, on which each way to run tasks takes a given time."""

    def __init__(self, monkeypatch):
        self.passed = 0.0
        monkeypatch.setattr("torchgpipe.engine.workers.perf_counter", lambda: self.passed)

    def run(self, runner, /, **seconds):
        """Run two tasks, and return who ran them."""
        seen = []
        run(runner, *[(device, lambda: seen.append(self._run(seconds))) for device in (A, B)])
        (way,) = {*seen}
        return way

    def _run(self, seconds):
        own = threading.current_thread() is threading.main_thread()
        way = "caller" if own else "workers"
        self.passed += seconds[way]
        return way


@pytest.fixture
def accelerators(monkeypatch):
    """Pretend that all devices are accelerators."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)


@pytest.fixture
def clock(accelerators, monkeypatch):
    return Clock(monkeypatch)


def blocked(clock, **seconds):
    """Workers that have seen a task block the caller."""
    workers = Workers(CPUS)
    assert clock.run(workers, **seconds) == "caller"
    workers.seen_to_block = True
    return workers


@pytest.mark.parametrize(("faster", "slower"), [("caller", "workers"), ("workers", "caller")])
def test_whoever_is_faster_and_now_and_then_the_other(clock, faster, slower):
    workers = blocked(clock, caller=1 if faster == "caller" else 2)
    ways = [clock.run(workers, **{faster: 1, slower: 2}) for _ in range(33)]
    assert ways[0] == "workers"
    assert [k for k, way in enumerate(ways, 1) if way == slower and k > 1] == [2, 4, 8, 16, 32]


def test_who_is_faster_changes(clock):
    workers = blocked(clock, caller=1)
    for _ in range(5):
        clock.run(workers, caller=1, workers=2)
    ways = [clock.run(workers, caller=3, workers=2) for _ in range(4)]
    assert ways == ["caller", "workers", "caller", "workers"]


def test_caller_runs_all_of_what_never_blocks(monkeypatch):
    """The caller runs such tasks in every step, even if they take long."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)
    monkeypatch.setattr("torchgpipe.engine.workers.logger.debug", pytest.fail)
    workers, seen = Workers(CPUS), []

    def compute():
        seen.append(threading.current_thread())
        sum(range(100_000))

    for _ in range(9):
        run(workers, *[(device, compute) for device in (A, B, A)])
    assert {*seen} == {threading.current_thread()}
    assert not workers._workers


def test_a_task_that_blocks_is_seen_and_told(accelerators):
    workers, seen = Workers(CPUS), []

    def block():
        seen.append(threading.current_thread())
        time.sleep(0.01)

    with TestCase().assertLogs("torchgpipe", "DEBUG") as told:
        for _ in range(2):
            run(workers, (A, block), (B, block))
    assert seen[:2] == [threading.current_thread()] * 2
    assert threading.current_thread() not in seen[2:]
    (record,) = told.records
    assert record.getMessage().startswith("cells blocked the host for ")


def test_caller_runs_nothing_beside_the_cpu(clock, monkeypatch):
    """Cells of the CPU would hold up those of the accelerators."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: device != B)
    workers = Workers([A, B])
    assert {clock.run(workers, workers=1) for _ in range(9)} == {"workers"}


def test_exceptions_and_modes_of_the_caller_that_issues(clock):
    workers, done = Workers(CPUS), []
    with pytest.raises(KeyError):
        run(workers, (A, list), (B, raiser(KeyError())), (A, partial(done.append, "late")))
    assert not done
    with torch.no_grad():
        run(workers, (A, lambda: done.append(torch.is_grad_enabled())))
    assert done == [False]


def test_a_task_waits_for_what_it_needs_and_for_nothing_else():
    """Tasks wait for a slow one that they need, and the others go on."""
    slow, log = threading.Event(), []

    def wait():
        assert slow.wait(10)
        log.append("slow")

    def last():
        log.append("last of A")
        slow.set()

    Workers(CPUS).run(
        [
            Task("a0", A, partial(log.append, "first of A")),
            Task("b0", B, wait, ["a0"]),
            Task("c0", C, partial(log.append, "after slow"), ["b0"]),
            Task("a1", A, last),
            Task("c1", C, partial(log.append, "end"), ["a1"]),
        ],
        Context(),
    )
    assert log == ["first of A", "last of A", "slow", "after slow", "end"]


def test_nothing_starts_or_runs_after_an_exception():
    workers = Workers(CPUS)
    started, release = threading.Event(), threading.Event()
    done = []

    def fail():
        started.wait(10)
        threading.Timer(0.05, release.set).start()
        raise KeyError

    def slow():
        started.set()
        release.wait(10)
        done.append("slow")

    with pytest.raises(KeyError):
        run(workers, (A, slow), (A, partial(done.append, "late")), (B, fail))
    # Running tasks have ended; waiting tasks have not started, and never will.
    assert done == ["slow"]
    run(workers, (A, partial(done.append, "next")))
    assert done == ["slow", "next"]


def test_exception_does_not_wait_for_what_takes_long():
    workers = Workers(CPUS)
    started, release, done = threading.Event(), threading.Event(), []

    def slow():
        started.set()
        assert release.wait(30)
        done.append("slow")

    def fail():
        assert started.wait(10)
        raise KeyError

    with pytest.raises(KeyError):
        run(workers, (A, slow), (A, partial(done.append, "late")), (B, fail))
    assert done == []
    # A second is promised.
    assert PATIENCE <= 0.5
    release.set()
    run(workers, (A, partial(done.append, "next")))
    assert done == ["slow", "next"]


def test_caller_that_is_interrupted_while_it_submits(monkeypatch):
    workers = Workers(CPUS)
    release, done = threading.Event(), []
    run(workers, (A, lambda: None), (B, lambda: None))
    workers._workers[A, 0].submit(release.wait)

    def submit(function):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers._workers[B, 0], "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        run(workers, (A, partial(done.append, "late")), (B, lambda: None))
    release.set()
    run(workers, (A, partial(done.append, "next")))
    assert done == ["next"]
