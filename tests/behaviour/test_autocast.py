"""Autocast, whose cache of cast weights and rules for joining could get in the way."""

import copy
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS, Apply, Plain
from tests.support.loops import BF16, FP16, Casting
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.ambient.context import Context
from torchgpipe.engine.workers import Task, Workers


@pytest.fixture
def models(mode):
    """A wrapped model and the plain one."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    plain = Plain(copy.deepcopy(layers), 4)
    return [GPipe(layers, [2, 2, 1], devices=CPUS[:3], chunks=4, checkpoint=mode), plain]


def autocast(dtype, **options):
    return torch.autocast("cpu", dtype, **options)


def gradients(model):
    return [p.grad for p in model.parameters()]


def equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("off", [False, True])
def test_weights_that_a_recomputation_casts_are_not_used_after_a_step(off, models):
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


def losses_of(layers, call, around):
    """The losses of three steps, between which the weights change."""
    found = []
    with around:
        for _ in range(3):
            found.append(call())
            with torch.no_grad():
                for p in layers.parameters():
                    p.mul_(-0.5)
    return found


@pytest.mark.parametrize("around", ["nothing", "a block", "a block that keeps nothing"])
def test_layers_that_enter_autocast_in_a_worker(mode, around):
    """A worker keeps casts of weights as long as the caller would, and no longer."""
    # Within another block PyTorch would find the casts of the first one, whatever their dtype.
    second = FP16 if around == "nothing" else BF16
    layers = nn.Sequential(nn.Linear(4, 4), Casting(second), nn.Linear(4, 4))
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    own = copy.deepcopy(layers)
    wrapped = GPipe(own, [1, 1, 1], devices=CPUS[:3], chunks=2, checkpoint=mode)
    training = ScheduledLoss(wrapped, nn.functional.mse_loss, "1f1b")

    def plain():
        halves = zip(x.chunk(2), target.chunk(2))
        return torch.stack([nn.functional.mse_loss(layers(a), b) for a, b in halves]).mean()

    def block():
        if around == "nothing":
            return nullcontext()
        return autocast(BF16, cache_enabled=around == "a block")

    found = losses_of(own, lambda: training(x, target), block())
    expected = losses_of(layers, plain, block())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_casts_that_a_worker_makes_after_its_step_has_failed(monkeypatch):
    """Such a worker may cast weights when the caller has left its block."""
    monkeypatch.setattr("torchgpipe.engine.workers.PATIENCE", 0.01)
    workers = Workers(CPUS[:2])
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)

    def fail():
        begun.wait(10)
        raise KeyError

    def cast():
        begun.set()
        go_on.wait(10)
        x @ weight

    tasks = [Task(0, CPUS[0], cast), Task(1, CPUS[1], fail, line=1)]
    with pytest.raises(KeyError), autocast(BF16):
        workers.run(tasks, Context())
    go_on.set()
    # After the task that is still running.
    workers._worker((CPUS[0], 0)).submit(ended.set)
    assert ended.wait(10)
    with torch.no_grad():
        weight.fill_(3)
    torch.autocast_increment_nesting()
    try:
        with autocast(BF16):
            assert (x @ weight)[0, 0] == 6
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()


class LeavesItOn(nn.Module):
    """A layer that leaves autocast on, and notes the dtype of a product in backward."""

    def __init__(self):
        super().__init__()
        self.weight, self.dtypes = nn.Parameter(torch.ones(2, 2)), []

    def forward(self, x):
        torch.set_autocast_enabled("cpu", True)
        y = x * self.weight.sum()
        y.register_hook(lambda grad: self.dtypes.append((grad @ torch.ones(2, 2)).dtype))
        return y


def test_a_layer_that_leaves_autocast_on():
    """The backward is in the dtype of its values, as that of a loss outside is."""
    layer = LeavesItOn()
    model = GPipe(nn.Sequential(layer, nn.Tanh()), [1, 1], devices=CPUS[:2], chunks=2)
    try:
        ScheduledLoss(model, nn.functional.mse_loss, "1f1b")(*torch.rand(2, 4, 2))
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert {*layer.dtypes} == {torch.float32}
