"""Code after the last mapped module, as of a loss, is computed again with the module."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchgpipe import MappedGPipe


class Square(Function):
    """A function that no mode sees, and that keeps what it was given."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def plain(model, x, y):
    return F.cross_entropy(x.float().view(-1, x.shape[-1]), y.view(-1))


def in_place(model, x, y):
    z = x * 2
    z[:, 0].mul_(3)
    z.add_(1).tanh_()
    return (z * z).sum()


def written(model, x, y):
    found = torch.zeros_like(x)
    found[:, 1:] = x[:, 1:].sigmoid()
    return found.pow(2).mean()


def changed_later(model, x, y):
    weights = torch.ones(x.shape[-1])
    loss = (x.tanh() + weights).pow(2).sum()
    weights.zero_()
    return loss


def dropped(model, x, y):
    return F.dropout(x.tanh(), 0.5, model.training).pow(2).sum()


def drawn(model, x, y):
    return F.dropout(x.tanh() * torch.rand(x.shape), 0.5).pow(2).sum()


def without_grad(model, x, y):
    with torch.no_grad():
        weight = x.softmax(-1)
    return (x.tanh() * weight).pow(2).sum()


def cast(model, x, y):
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ model.weight
    return z.float().pow(2).mean()


def function(model, x, y):
    return Square.apply(x.tanh()).exp().sum()


def checkpointed(model, x, y):
    return checkpoint(lambda x: x.tanh().exp().sum(), x, use_reentrant=False)


def hooked(model, x, y):
    def pack(tensor):
        model.total.add_(1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return x.tanh().exp().sum()


def with_weights(model, x, y):
    return F.layer_norm(x @ model.weight, x.shape[-1:]).pow(3).sum()


def kept_apart(model, x, y):
    return (x.tanh() * model.hidden.exp()).pow(2).sum()


def caught(model, x, y):
    with contextlib.suppress(RuntimeError):
        x = x.exp().log() @ x
    return x.exp().sum()


def penalty(model, x, y):
    z = x.tanh().pow(2)
    (grad,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return (z + grad.pow(2)).sum()


def counted(model, x, y):
    model.total.add_(x.detach().tanh().sum())
    return x.tanh().pow(2).sum()


def normed(model, x, y):
    return F.batch_norm(x.flatten(0, 1), model.mean, model.mean + 1, training=True).pow(3).sum()


def through_data(model, x, y):
    z = x.tanh()
    z.data.mul_(2)
    return z.exp().sum()


CODE = {
    x.__name__: x
    for x in (
        *(plain, in_place, written, changed_later, dropped, drawn, without_grad, cast, function),
        *(checkpointed, hooked, with_weights, kept_apart, caught, penalty, counted, normed),
        through_data,
    )
}


class Model(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 5)
        self.weight = nn.Parameter(torch.rand(5, 5))
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(5))
        self.code = code

    def forward(self, x, y):
        hidden = self.body(x)
        self.hidden = hidden[..., :5].sigmoid()
        return self.code(self, self.head(hidden.relu()), y)


def result(model, mode):
    """Train two steps; what they have found, as tensors."""
    pipe = MappedGPipe(model, {"": "cpu", "head": "cpu"}, chunks=2, checkpoint=mode)
    x, y = torch.rand(4, 3, 4), torch.randint(5, (4, 3))
    found = []
    for _ in range(2):
        pipe.zero_grad()
        losses = pipe(x, y)
        losses.sum().backward()
        grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
        found += [losses.detach(), *grads]
    return [*found, *model.buffers()]


def compare(make, mode):
    results = []
    for one in ("never", mode):
        torch.manual_seed(0)
        try:
            results.append(result(make(), one))
        except RuntimeError as error:
            pytest.fail(f"{one}: {error}")
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("name", CODE)
def test_code_of_any_kind(name, mode):
    compare(partial(Model, CODE[name]), mode)


def test_what_the_code_was_given_has_changed():
    labels = torch.randint(5, (4, 3))
    pipe = MappedGPipe(Model(plain), {"": "cpu", "head": "cpu"}, checkpoint="always")
    losses = pipe(torch.rand(4, 3, 4), labels)
    labels.zero_()
    with pytest.raises(RuntimeError, match="change a clone of it, or change it after backward"):
        losses.sum().backward()


def test_a_backward_that_is_recorded():
    results = []
    for mode in ("never", "always"):
        torch.manual_seed(0)
        model = Model(with_weights)
        pipe = MappedGPipe(model, {"": "cpu", "head": "cpu"}, chunks=2, checkpoint=mode)
        x = torch.rand(4, 3, 4, requires_grad=True)
        loss = pipe(x, torch.randint(5, (4, 3))).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.pow(2).sum()).backward()
        grads = [x.grad for x in model.parameters()]
        results.append([x.grad, *grads])
    torch.testing.assert_close(*results)
