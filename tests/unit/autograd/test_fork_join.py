"""The autograd functions fork and join."""

import gc
import weakref

import pytest
import torch

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


def test_gradients_pass():
    a = torch.tensor([2.0], requires_grad=True)
    b = torch.tensor([3.0], requires_grad=True)
    a2, phony = fork(a * 1)
    b2 = join(b * 1, phony)
    (a2 * b2).backward()
    assert (a.grad.item(), b.grad.item()) == (3.0, 2.0)


def test_double_backward():
    a = torch.tensor([2.0], requires_grad=True)
    x, phony = fork(a**3)
    x = join(x, phony)
    (grad,) = torch.autograd.grad(x, a, create_graph=True)
    (second,) = torch.autograd.grad(grad, a)
    assert second.item() == 12.0


def test_tuple_keeps_what_requires_grad():
    x = torch.ones(2, requires_grad=True)
    inputs = (torch.ones(2, dtype=torch.long), x * 1, torch.ones(2))
    outputs, phony = fork(inputs)
    joined = join(outputs, phony)
    for output in (outputs, joined):
        assert [t.requires_grad for t in output] == [False, True, False]
        assert all(t.data_ptr() == s.data_ptr() for t, s in zip(output, inputs))
    joined[1].sum().backward()
    assert x.grad.tolist() == [1, 1]


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


def test_no_gradient_for_one_of_two():
    x = torch.ones(1, requires_grad=True)
    (a, b), phony = fork((x * 2, x * 3))
    a, b = join((a, b), phony)
    b.backward()
    assert x.grad.item() == 3


def test_output_may_be_changed_in_place():
    x = torch.tensor([-1.0, 1.0], requires_grad=True)
    (y, _), phony = fork((x * 2, x * 1))
    y.mul_(3)
    y = join(y, phony)
    y.relu_()
    y.sum().backward()
    assert x.grad.tolist() == [0, 6]


def test_join_takes_several_phonies():
    log = []
    forked = [fork(Log(k, log)(torch.ones(1, requires_grad=True))) for k in range(3)]
    last = Log("last", log)(torch.ones(1, requires_grad=True))
    last = join(last, *[phony for _, phony in forked])
    (Log("first", log)(last) + sum(x for x, _ in forked)).backward()
    order = [name for direction, name, _ in log if direction == "backward"]
    assert order[0] == "first"
    assert {*order} == {"first", "last", 0, 1, 2}


def test_graph_bears_the_name():
    x, phony = fork(torch.ones(1, requires_grad=True))
    assert join(x, phony).grad_fn.name() == "JoinBackward"


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_wait_for_nothing():
    x = torch.eye(2).to_sparse().requires_grad_()
    y, phony = fork(x * 2)
    assert not phony.requires_grad
    torch.sparse.sum(y).backward()
    assert x.grad.to_dense().tolist() == [[2, 0], [0, 2]]


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
