"""Training steps whose calls of the model become one."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

# Not before it is known that Transformers is there.
from torchgpipe.transformers.joined_step import JoinedStep, one_backward


def joined(count, run, state=tuple):
    """The losses, and the calls that were computed at once."""
    computed = []

    def compute(calls):
        computed.append([*calls])
        return [10 * call for call in calls]

    step = JoinedStep(lambda k: run(step, k), count, compute, state)
    return step.losses(), computed


def test_calls_become_one():
    assert joined(3, lambda step, k: step.call(k) + k) == ([0, 11, 22], [[0, 1, 2]])


def test_a_second_call_is_computed_alone():
    found, computed = joined(2, lambda step, k: step.call(k) + step.call(k + 5))
    assert found == [50, 70]
    assert computed == [[0, 1], [6], [5]]


def test_a_call_without_grad_is_computed_at_once():
    def run(step, k):
        with torch.no_grad():
            step.call(k)
        return step.call(k + 5)

    assert joined(2, run)[1] == [[0], [1], [5, 6]]


def test_a_mini_batch_without_a_call():
    found, computed = joined(3, lambda step, k: -1 if k == 1 else step.call(k))
    assert found == [0, -1, 20]
    assert computed == [[0, 2]]


def test_state_that_the_next_mini_batch_would_replace():
    kept = []

    def run(step, k):
        if k == 1:
            kept.append(k)
        return step.call(k)

    assert joined(3, run, lambda: [*kept])[1] == [[1], [0, 2]]


def test_a_call_that_fails_is_that_of_its_own_mini_batch():
    """Code that catches the error leaves out the mini-batch that it would leave out alone."""
    computed = []

    def compute(calls):
        computed.append([*calls])
        if 1 in calls:
            raise KeyError
        return [10 * call for call in calls]

    def run(k):
        try:
            return step.call(k)
        except KeyError:
            return -1

    step = JoinedStep(run, 3, compute, tuple)
    assert step.losses() == [0, -1, 20]
    assert computed == [[0, 1, 2], [2], [1], [0]]


def test_full_memory_is_told_at_once():
    def compute(calls):
        raise torch.OutOfMemoryError

    step = JoinedStep(lambda k: step.call(k), 3, compute, tuple)
    with pytest.raises(torch.OutOfMemoryError):
        step.losses()


def test_one_backward():
    x = torch.ones(2, requires_grad=True)
    calls = []

    def backward(loss, **kwargs):
        calls.append(kwargs)
        loss.backward()

    accelerator = SimpleNamespace(backward=backward)
    with one_backward(accelerator):
        for k in range(3):
            accelerator.backward(k * x.sum(), rate=1)
        assert x.grad is None
    assert x.grad.tolist() == [3, 3]
    assert calls == [{"rate": 1}]
    with pytest.raises(KeyError), one_backward(accelerator):
        accelerator.backward(x.sum())
        raise KeyError
    assert accelerator.backward is backward
    assert x.grad.tolist() == [3, 3]
