"""Several wrappers: in several threads, and one after another."""

import copy
import threading
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import Apply
from tests.support.long_runs import (
    WAYS,
    Piped,
    eventually,
    run_in_threads,
    uncollected,
)
from torchgpipe import GPipe, is_recomputing

WIDTH = 4


@pytest.fixture(params=WAYS)
def wrap(request):
    return partial(WAYS[request.param], balance=[2, 2], chunks=2, devices=["cpu"] * 2)


def layers(between=None):
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), between or nn.Tanh(), nn.Linear(WIDTH, 2)
    ).double()


def batch():
    return torch.rand(6, WIDTH, dtype=torch.double, requires_grad=True)


def found(model, input):
    """The output of a model, and its gradients."""
    output = model(input)
    leaves = [input, *model.parameters()]
    return [output, *torch.autograd.grad(output.square().sum(), leaves)]


def expected(module, input):
    return found(copy.deepcopy(module), input)


def test_one_wrapper_in_several_threads(wrap, mode):
    """Threads may run one wrapper at once, except while a backward recomputes."""
    model = wrap(layers(), checkpoint=mode)
    inputs = [batch() for _ in range(4)]
    right = [found(model, x) for x in inputs]
    steps = threading.Lock() if mode != "never" else threading.Semaphore(4)

    def use(input, right):
        for _ in range(5):
            with steps:
                torch.testing.assert_close(found(model, input), right)
            with torch.no_grad():
                torch.testing.assert_close(model(input), right[0])

    run_in_threads([partial(use, *case) for case in zip(inputs, right)])


def test_nothing_runs_beside_a_recomputation_of_its_layers():
    """A recomputation exchanges the buffers and flags of its layers."""
    begun, beside, runs = threading.Event(), threading.Event(), []

    def wait(x):
        runs.append("again" if is_recomputing() else "forward")
        if is_recomputing():
            begun.set()
            beside.wait(0.3)
            runs.append("over")
        elif begun.is_set():
            beside.set()
        return x.tanh()

    model = GPipe(layers(Apply(wait)), [2, 2], devices=["cpu"] * 2, checkpoint="always")
    loss = model(batch()).sum()

    def use():
        assert begun.wait(10)
        with torch.no_grad():
            model(batch())

    run_in_threads([loss.backward, use])
    assert runs == ["forward", "again", "over", "forward"]


def test_one_wrapper_in_threads_of_which_one_fails(wrap):
    failing = threading.local()

    def fail(x):
        if getattr(failing, "wanted", False) or x.isnan().any():
            raise KeyError
        return x

    model = wrap(layers(Apply(fail)))
    good = batch()
    bad, right = torch.full_like(good, torch.nan), found(model, good)

    def use(input, error):
        for _ in range(10):
            if error:
                with pytest.raises(KeyError), torch.no_grad():
                    model(input)
            else:
                torch.testing.assert_close(model(input), right[0])

    run_in_threads([partial(use, good, False), partial(use, bad, True)] * 2)


def test_threads_end_with_a_wrapper_that_is_dropped():
    before = {*threading.enumerate()}
    with uncollected():
        model = Piped(layers(), [1, 1, 1, 1])
        output = model(batch())
        started = {*threading.enumerate()} - before
        assert len(started) == 4
        del model
        # Backward of its output works all the same.
        output.sum().backward()
        assert eventually(lambda: not started & {*threading.enumerate()})
