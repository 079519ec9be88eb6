"""Hooks of partitions, of outputs and of the wrapper; those of layers are in ``tests/contract``."""

import pytest
import torch
from torch import nn

from tests.support.helpers import Plain
from torchgpipe import GPipe

M = 3


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Sigmoid(), nn.GELU()), nn.Linear(4, 2)
    ).double()


@pytest.fixture
def models(device, mode):
    """The plain model and the wrapped one."""
    wrapped = GPipe(layers(), [1, 2, 1], devices=[device] * 3, chunks=M, checkpoint=mode)
    return Plain(layers().to(device), M), wrapped


@pytest.fixture
def input(device):
    return torch.randn(7, 3, dtype=torch.double, device=device)


def step(model, input):
    """The output and all gradients."""
    x = input.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *[p.grad for p in model.parameters()]]


def same(a, b):
    """Check that two lists of tensors are equal, and not empty."""
    torch.testing.assert_close(b, a)
    assert all(x is not None for x in a)


def test_hooks_of_the_input_and_of_the_output(models, input):
    found = []
    for model in models:
        calls = []
        x = input.clone().requires_grad_()
        x.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
        x.register_hook(lambda grad: grad * 2)
        output = model(x)
        output.register_hook(lambda grad, calls=calls: calls.append(grad.clone()))
        output.register_hook(lambda grad: grad.tanh())
        output.grad_fn.register_hook(lambda *_, calls=calls: calls.append(torch.ones(1)))
        output.grad_fn.register_prehook(lambda *_, calls=calls: calls.append(torch.zeros(1)))
        output.retain_grad()
        output.square().sum().backward()
        found.append([*calls, output.grad, x.grad])
    assert len(found[1]) == 6
    same(*found)


def test_forward_hook_of_a_partition_changes_what_goes_on(models, input):
    reference, model = models
    model.partitions[1].register_forward_hook(lambda m, args, output: output * 2)
    reference[2].register_forward_hook(lambda m, args, output: output * 2)
    same(*[step(model, input) for model in models])


def test_backward_hooks_of_a_partition(models, input):
    reference, model = models
    calls, expected = [], []
    model.partitions[1].register_full_backward_pre_hook(lambda m, grads: calls.append(None))
    model.partitions[1].register_full_backward_hook(lambda m, gin, gout: calls.append(gin[0]))
    reference[1].register_full_backward_hook(lambda m, gin, gout: expected.append(gin[0]))
    step(model, input), step(reference, input)
    assert len(calls) == 2 * M
    same(expected, calls[1::2])
