"""Autocast, whose cache of cast weights and rules for joining could get in the way."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS, MODES, Apply, Plain
from torchgpipe import GPipe

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(params=MODES)
def models(request):
    """A wrapped model and the plain one."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = Plain(copy.deepcopy(layers), 4)
    return [GPipe(layers, [2, 2, 1], devices=CPUS[:3], chunks=4, checkpoint=request.param), plain]


def autocast(dtype, **options):
    return torch.autocast("cpu", dtype, **options)


def gradients(model):
    return [p.grad for p in model.parameters()]


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("off", [False, True])
def test_weights_that_a_second_run_casts_are_not_used_after_a_step(off, models):
    """Backward and the next forward are in one block, and backward has another block within it."""
    x, found = torch.rand(8, 4), []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        with autocast(BF16):
            loss = model(x).float().square().sum()
        with autocast(BF16):
            with autocast(BF16, enabled=False) if off else nullcontext():
                loss.backward()
            optimizer.step()
            found.append(model(x).detach())
    equal(*found)


def test_backward_of_two_forwards_in_a_block_of_the_other_dtype(models):
    """Weights cast to one dtype must not be used where autocast asks for the other."""
    x = torch.rand(8, 4)
    for model in models:
        with autocast(BF16):
            one = model(x).float().square().sum()
        with autocast(FP16):
            other = model(x).float().square().sum()
            (one + other).backward()
            model(x).float().square().sum().backward()
    equal(*map(gradients, models))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", [False, True], ids=["joined", "stacked"])
def test_outputs_of_a_dtype_that_autocast_would_not_join(dtype, reduce):
    last = Apply(lambda x: (x.sum() if reduce else x).to(dtype))
    model = GPipe(nn.Sequential(nn.Linear(4, 4), last), [1, 1], devices=CPUS[:2], chunks=2)
    for autocast_dtype in (BF16, FP16):
        with autocast(autocast_dtype):
            assert model(torch.rand(4, 4)).dtype is dtype
