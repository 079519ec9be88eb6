"""A scheduled loss is a loss: what may be done with it, and what is refused."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.autograd import outcome
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


def test_loss():
    training = make()
    loss = training(X, Y)
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    assert loss.shape == ()
    loss.backward()
    same(training, expected())


def test_gradients_come_with_backward():
    training = make()
    training(X, Y)
    assert all(x.grad is None for x in training.parameters())


@pytest.mark.parametrize("change", [lambda x: x * 3, lambda x: x / 2, lambda x: -x + 5])
def test_what_is_done_to_the_loss_counts(change):
    training = make()
    change(training(X, Y)).backward()
    module = layers()
    change(F.mse_loss(module(X), Y)).backward()
    same(training, [x.grad for x in module.parameters()])


def test_losses_add_up():
    training = make()
    (training(X, Y) + training(X, Y)).backward()
    same(training, expected(2))


def test_gradients_add_up():
    training = make()
    for _ in range(3):
        (training(X, Y) / 3).backward()
    same(training, expected())


def test_grad():
    training = make()
    weights = [*training.parameters()]
    for own, other in zip(torch.autograd.grad(training(X, Y), weights), expected()):
        torch.testing.assert_close(own, other)
    assert all(x.grad is None for x in weights)


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_hooks_of_weights_see_the_sum_once(schedule):
    training = make(schedule=schedule)
    seen, after = [], []
    weight = training.model[0].weight
    weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    weight.register_post_accumulate_grad_hook(lambda x: after.append(x.grad.clone()))
    training(X, Y).backward()
    torch.testing.assert_close(seen, [expected()[0]])
    torch.testing.assert_close(after, [2 * expected()[0]])


def test_optimizer_that_steps_in_backward():
    training = make()
    weights = [*training.parameters()]
    for weight in weights:
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    before = [x.detach().clone() for x in weights]
    training(X, Y).backward()
    for own, old, grad in zip(weights, before, expected()):
        torch.testing.assert_close(own, old - 0.1 * grad)


@pytest.mark.parametrize("grad", [True, False])
def test_evaluation_is_forward_alone(grad):
    training = make(outputs=True)
    if grad:
        training.eval()
    with torch.set_grad_enabled(grad):
        loss, output = training(X, Y)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, F.mse_loss(layers()(X), Y))
    torch.testing.assert_close(output, layers()(X))


def test_outputs():
    training = make(outputs=True)
    loss, output = training(X, Y)
    torch.testing.assert_close(output, layers()(X))
    assert not output.requires_grad
    loss.backward()
    same(training, expected())


def test_all_is_frozen():
    training = make(module=layers().requires_grad_(False))
    assert not training(X, Y).requires_grad


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


def test_fewer_rows_than_chunks():
    training = make(schedule=one_f_one_b(2, 4), chunks=4)
    training(X[:2], Y[:2]).backward()
    module = layers()
    F.mse_loss(module(X[:2]), Y[:2]).backward()
    same(training, [x.grad for x in module.parameters()])


@pytest.mark.parametrize(("model", "loss"), [(layers(), F.mse_loss), (None, 3)])
def test_wrong_arguments(model, loss):
    model = model or GPipe(layers(), [2, 1], devices=["cpu"] * 2)
    with pytest.raises(TypeError, match="must be a"):
        ScheduledLoss(model, loss)


@pytest.mark.parametrize(
    "loss",
    [nn.MSELoss(reduction="sum"), partial(F.mse_loss, reduction="sum")],
    ids=["module", "partial"],
)
def test_losses_that_say_that_they_are_sums(loss):
    with pytest.raises(ValueError, match=r"\(reduction: 'sum'\)"):
        make(loss=loss)


def test_model_without_partitions():
    with pytest.raises(ValueError, match="model must have a partition"):
        ScheduledLoss(GPipe(nn.Sequential(), []), F.mse_loss)


def test_one_micro_batch_is_a_warning():
    with pytest.warns(UserWarning, match="GPipe trains without pipelining"):
        make(chunks=1)(X, Y)


def test_state_dict_has_the_keys_of_the_model():
    training = make()
    keys = {f"model.{key}" for key in training.model.state_dict()}
    assert training.state_dict().keys() == keys


class Fails(nn.Linear):
    """A layer that fails when it is told so."""

    fails = False

    def forward(self, x):
        if self.fails:
            raise KeyError
        return super().forward(x)


def test_hooks_are_back_after_a_failure():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Fails(3, 3))
    training = make(module=module)
    calls = []
    module[0].weight.register_hook(calls.append)
    module[2].fails = True
    with pytest.raises(KeyError):
        training(X, Y)
    module[2].fails = False
    training(X, Y).backward()
    assert len(calls) == 1


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


def test_float16_without_a_scaler():
    training = make()
    with (
        torch.autocast("cpu", torch.float16),
        pytest.warns(UserWarning, match="needs the gradient scaler"),
    ):
        training(X, Y)


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
