"""A step holds the locks of generators, and what computes a cell of it takes none."""

import threading
from functools import partial

import pytest
import torch

from torchgpipe.ambient import random_numbers as rng
from torchgpipe.ambient.generators import holding
from torchgpipe.ambient.random_numbers import FirstNumbers, StepNumbers

CPU = torch.device("cpu")


def test_one_thread_at_a_time_turns_the_cpu_generator_back():
    states, draws = [], {}
    for k in range(4):
        states.append(FirstNumbers(CPU))
        draws[k] = [torch.rand(50)]
        states[k].end_first_run()
    before = torch.get_rng_state()

    def draw(k):
        with states[k].restored():
            draws[k].append(torch.rand(50))

    def repeat(k):
        for _ in range(20):
            holding(states[k].locks, partial(draw, k))

    threads = [threading.Thread(target=repeat, args=(k,)) for k in draws]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(first, x) for first, *rest in draws.values() for x in rest)
    assert torch.equal(before, torch.get_rng_state())


@pytest.fixture
def timeout():
    """Seconds after which a thread that should end counts as waiting."""
    yield 10
    # One that has waited goes on once the test lets go: not into what the next test replaces.
    while THREADS:
        THREADS.pop().join(10)


THREADS = []


def in_a_thread(function, timeout):
    """Whether a function ends when a new thread calls it."""
    thread = threading.Thread(target=function, daemon=True)
    THREADS.append(thread)
    thread.start()
    thread.join(timeout)
    return not thread.is_alive()


def step(function=lambda: None):
    """Take a step of one cell, which calls a function."""
    draws = StepNumbers([CPU], 1)

    def run():
        with draws, draws.of(0, CPU):
            return function()

    return holding(draws.locks, run)


def test_one_step_at_a_time(timeout):
    draws = StepNumbers([CPU], 1)
    assert not holding(draws.locks, lambda: in_a_thread(step, timeout=0.05))
    assert in_a_thread(step, timeout)


def test_recomputation_within_a_cell_does_not_wait(timeout):
    state = FirstNumbers(CPU)
    torch.rand(3)
    state.end_first_run()
    draws = StepNumbers([CPU], 1)

    def recompute():
        with state.restored():
            torch.rand(3)

    def within():
        with draws.of(0, CPU):
            holding(state.locks, recompute)

    def run():
        with draws:
            return in_a_thread(within, timeout)

    assert holding(draws.locks, run)


def test_step_that_does_not_begin_has_nobody_wait(timeout, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(rng, "get_state", lambda device: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step()
    assert in_a_thread(step, timeout)
