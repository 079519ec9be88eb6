"""The autograd functions fork and join."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.helpers import Log
from torchgpipe.autograd import fork_join


def fork(input):
    """Fork a tensor alone, or a tuple."""
    if isinstance(input, tuple):
        return fork_join.fork(input)
    (output,), phony = fork_join.fork((input,))
    return output, phony


def join(input, *phonies):
    """Join phonies into a tensor alone, or a tuple."""
    if isinstance(input, tuple):
        return fork_join.join(phonies, *input)
    return fork_join.join(phonies, input)[0]


def test_join_is_differentiated_before_fork():
    log = []
    a = torch.ones(1, requires_grad=True)
    b = torch.ones(1, requires_grad=True)

    a = Log("a", log)(a)
    a, phony = fork(a)
    b = join(b, phony)
    b = Log("b", log)(b)
    # Without the phony, autograd takes the node recorded last first: the other way round.
    a = Log("a2", log)(a)
    (b + a).backward()

    order = [name for direction, name, _ in log if direction == "backward"]
    assert order.index("b") < order.index("a")


def test_gradient_waits_for_the_join():
    log = []
    b = Log("b", log)(torch.ones(1, requires_grad=True))
    a = Log("a", log)(torch.ones(1, requires_grad=True))
    a, phony = fork(a)
    b = join(b, phony)
    b = Log("b2", log)(b)
    torch.autograd.backward([a, b])
    order = [name for direction, name, _ in log if direction == "backward"]
    assert order.index("b2") < order.index("a")


def test_without_a_gradient_to_come_nothing_happens():
    x = torch.ones(1)
    y, phony = fork(x)
    assert y is x
    assert not phony.requires_grad
    a = torch.ones(1, requires_grad=True)
    assert join(a, phony) is a
    _, phony = fork(a)
    assert join(x, phony) is x
    with torch.no_grad():
        assert fork(a)[0] is a
        assert join(a, phony) is a


def test_phony_is_no_operator_of_a_mode(monkeypatch):
    """A policy of PyTorch's would look for it in the first run of a checkpoint."""

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    monkeypatch.setattr(fork_join, "_phonies", {})
    with Refuse():
        fork_join.get_phony(torch.device("cpu"), requires_grad=True)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_wait_for_nothing():
    x = torch.eye(2).to_sparse().requires_grad_()
    y, phony = fork(x * 2)
    assert not phony.requires_grad
    torch.sparse.sum(y).backward()
    assert x.grad.to_dense().tolist() == [[2, 0], [0, 2]]


def test_phonies_outlive_inference_mode(monkeypatch):
    monkeypatch.setattr(fork_join, "_phonies", {})
    with torch.inference_mode():
        fork_join.get_phony(torch.device("cpu"), requires_grad=False)
    assert not fork_join.get_phony(torch.device("cpu"), requires_grad=False).is_inference()


def test_nothing_leaks():
    x = torch.ones(1, requires_grad=True)
    gc.disable()
    try:
        y, phony = fork(x * 1)
        z = join(y, phony)
        dead = [weakref.ref(t) for t in (y, phony, z)]
        del y, phony, z
        assert [ref() for ref in dead] == [None] * 3
    finally:
        gc.enable()
