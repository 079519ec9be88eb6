"""Both ends of backward: the functions called there, and the queue after a failure."""

import gc
import weakref

import pytest
import torch

from torchgpipe.autograd.nodes import between, drain_after_failure


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError


def logged(log, x):
    y = x * 2
    y.register_hook(lambda grad: log.append("layers"))
    return between(lambda: log.append("begin"), lambda: log.append("end"), y)[0]


def test_functions_are_called_in_every_backward():
    log = []
    x = torch.ones(2, requires_grad=True)
    output = logged(log, x)
    output.sum().backward(retain_graph=True)
    x.register_post_accumulate_grad_hook(lambda x: log.append("gradient"))
    output.sum().backward()
    assert log == ["begin", "layers", "end", "begin", "layers", "gradient", "end"]
    assert x.grad.tolist() == [4, 4]


def test_end_is_not_called_after_a_failure():
    log = []
    with pytest.raises(KeyError):
        logged(log, Fail.apply(torch.ones(2, requires_grad=True))).sum().backward()
    assert log == ["begin", "layers"]


def test_failure_leaves_nothing_in_the_queue():
    def step():
        x = torch.ones(2, requires_grad=True)
        # Autograd runs the node recorded last first, so the failure comes before the first layer.
        kept = x.exp()
        output = kept.sum() + Fail.apply(x).sum()
        drain_after_failure([output])
        with pytest.raises(KeyError):
            output.backward()
        return weakref.ref(kept.untyped_storage())

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()
