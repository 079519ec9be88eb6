"""A scheduled loss is a loss: what may be done with it, and what is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.engine import outcome
from torchgpipe.schedule import one_f_one_b

X, Y = torch.rand(6, 3), torch.rand(6, 3)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def make(loss=F.mse_loss, schedule="1f1b", module=None, chunks=3, checkpoint="never", **options):
    model = GPipe(
        module or layers(), [2, 1], devices=["cpu"] * 2, chunks=chunks, checkpoint=checkpoint
    )
    return ScheduledLoss(model, loss, schedule, **options)


def expected(factor=1.0):
    module = layers()
    (F.mse_loss(module(X), Y) * factor).backward()
    return [x.grad for x in module.parameters()]


def same(training, grads):
    found = [x.grad for x in training.model.parameters()]
    for own, other in zip(found, grads):
        torch.testing.assert_close(own, other)


def test_another_model():
    training = make()
    training(X, Y).backward()
    training.model = GPipe(layers(), [1, 1, 1], devices=["cpu"] * 3, chunks=2)
    training(X, Y).backward()
    same(training, expected())


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_options_may_change_between_steps(checkpoint):
    training = make()
    training(X, Y).backward()
    training.zero_grad()
    training.schedule = "zbh1"
    training.model.chunks, training.model.checkpoint = 2, checkpoint
    training(X, Y).backward()
    same(training, expected())


def test_schedule_that_does_not_fit():
    with pytest.raises(ValueError, match="as many stages as partitions"):
        make(schedule=one_f_one_b(3, 3))
    training = make()
    with pytest.raises(ValueError, match="name must be"):
        training.schedule = "no such"
    assert training.schedule == "1f1b"


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")],
    ids=["module", "partial"],
)
def test_losses_that_say_that_they_are_sums(loss):
    with pytest.raises(ValueError, match=r"\(reduction: 'sum'\)"):
        make(loss=loss)


def test_a_sum_whose_weight_the_targets_tell():
    training = make(nn.MSELoss(reduction="sum"), weight_of=torch.numel)
    loss = training(X, Y)
    torch.testing.assert_close(loss.detach(), F.mse_loss(layers()(X), Y))
    loss.backward()
    same(training, expected())
    with pytest.raises(ValueError, match="reduction"):
        training.weight_of = None
    with pytest.raises(TypeError, match=r"weight_of must be a function .*\(weight_of: 3\)"):
        training.weight_of = 3
    training.weight_of = lambda target: "a"
    with pytest.raises(TypeError, match="what weight_of returns"):
        training(X, Y)


def test_model_without_partitions():
    with pytest.raises(ValueError, match="model must have a partition"):
        ScheduledLoss(GPipe(nn.Sequential(), []), F.mse_loss)


def test_gradient_scaler():
    """Gradients that are too small for float16 reach the weights, as with the loss outside."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss(output, target):
        return (output.half() * 1e-7).float().mean()

    training = make(loss, scaler=scaler)
    scaler.scale(training(X, Y)).backward()
    module = layers()
    scaler.scale(loss(module(X), Y)).backward()
    for own, other in zip(training.model.parameters(), module.parameters()):
        torch.testing.assert_close(own.grad, other.grad, rtol=2e-2, atol=0)
    assert module[0].weight.grad.abs().max() > 0


def test_scale_is_divided_out():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = make(scaler=scaler)
    loss = training(X, Y)
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    loss.backward()
    same(training, expected())


class Exact(nn.Linear):
    """A layer that computes without autocast, and whose backward shall do so, too."""

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_autocast(checkpoint):
    """Backward runs without autocast, as it does outside of its block."""
    module = nn.Sequential(nn.Linear(3, 3), Exact(3, 3), Exact(3, 3))
    training = make(module=copy.deepcopy(module), checkpoint=checkpoint)
    with torch.autocast("cpu", torch.bfloat16):
        training(X, Y).backward()
    for x, y in zip(X.chunk(3), Y.chunk(3)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(module(x), y)
        (loss / 3).backward()
    same(training, [x.grad for x in module.parameters()])


def test_large_weights_of_two_workers(monkeypatch):
    """Each worker sums up in a thread of its own what both compute for one weight."""
    monkeypatch.setattr(outcome, "LARGE", 0)
    module = layers()
    module[2].weight = module[0].weight
    plain = copy.deepcopy(module)
    make(module=module)(X, Y).backward()
    F.mse_loss(plain(X), Y).backward()
    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
