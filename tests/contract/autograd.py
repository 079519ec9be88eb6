"""Autograd."""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, grad
from torch.autograd.functional import hessian, jacobian
from torch.func import functional_call
from torch.nn import functional as F

from tests.contract.comparing import assert_same_buffers
from tests.contract.promises import Otherwise, promise
from tests.contract.values import batch
from tests.contract.wrapped import assert_same_grads, linears, plain_step, trained
from torchgpipe import is_recomputing

#: A step across processes has its backward inside.
NO_GRAPH = Otherwise(
    "Its loss has no graph, since the step across processes has computed backward.",
    "does not require grad|independent of|the scaler",
)
ONCE = Otherwise(
    "Backward runs within the call, and the loss hands the gradients over once, as numbers.",
    "a scheduled loss (are computed during|hands one gradient)|handed its gradients over|"
    "second time|let go of|after a recomputation",
)
WITHIN = {"ScheduledLoss": ONCE, "ScheduledLoss of graphs": ONCE, "Pipe": NO_GRAPH}

#: What takes a loss with a graph, and what takes a graph of all layers.
LOSS = {"otherwise": {"Pipe": NO_GRAPH}, "modes": True, "devices": True}
GRAPH = {"otherwise": WITHIN, "modes": True, "devices": True}


def pair(make, layers=None, **options):
    """A wrapped model, the plain layers, and a batch for each, whose inputs are leaves."""
    layers = linears(6, 6, 6) if layers is None else layers
    model = make(layers, **options)
    x, y, own, target = batch(8, model)
    return model, layers, (x.requires_grad_(), y), (own.detach().requires_grad_(), target)


def plain_loss(layers, input, target):
    return F.mse_loss(layers(input), target)


def same(found, expected):
    """Check that gradients are equal, wherever they are."""
    torch.testing.assert_close([x.cpu() for x in found], [*expected])


@promise("Gradients of several steps add up until they are set to zero.", modes=True)
def accumulation(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    optimizers = [torch.optim.Adam(some.parameters(), 0.1) for some in (layers, model.layers)]
    for step in range(6):
        x, y, *moved = batch(8, model)
        plain_step(layers, x, y)
        model.step(*moved)
        assert_same_grads(model, layers)
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 2)


@promise(
    "The input gets its gradient; those of weights are clipped by the norm of all of them.",
    modes=True,
    devices=True,
)
def clipping(make):
    model, layers, plain, own = pair(make)
    plain_step(layers, *plain)
    model.step(*own)
    assert_same_grads(model, layers)
    same([x for x in model.all([own[0].grad]) if x is not None], [plain[0].grad])
    expected = nn.utils.clip_grad_norm_(layers.parameters(), 0.01)
    assert abs(model.clip_grad_norm(0.01) - expected) < 1e-6
    assert_same_grads(model, layers)


@promise(
    "A gradient scaler scales the loss, and leaves out a step that overflows.",
    otherwise={"Pipe": NO_GRAPH},
    devices=True,
)
def scaler(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    scales = []
    for run in (layers, model):
        torch.manual_seed(1)
        some = layers if run is layers else model.layers
        optimizer = torch.optim.SGD(some.parameters(), 0.1)
        own = torch.amp.GradScaler(model.first.type, init_scale=2.0**10)
        for factor in (1, torch.finfo(torch.float).max, 2):
            x, y, *moved = batch(8, model)
            optimizer.zero_grad()
            loss = plain_loss(layers, x, y) if run is layers else model.loss(*moved)
            own.scale(loss * factor).backward()
            own.unscale_(optimizer)
            nn.utils.clip_grad_norm_(some.parameters(), 0.1)
            own.step(optimizer)
            own.update()
            scales.append(own.get_scale())
    assert scales[:3] == scales[3:]
    assert scales[0] == 2 * scales[1]
    same(model.layers.parameters(), layers.parameters())


@promise("A loss may be scaled, and losses of several mini-batches added up.", **LOSS)
def scaled(make):
    model, layers, plain, own = pair(make)
    (plain_loss(layers, *plain) / 4 + 3 * plain_loss(layers, plain[0] * 2, plain[1])).backward()
    (model.loss(*own) / 4 + 3 * model.loss(own[0] * 2, own[1])).backward()
    assert_same_grads(model, layers)
    same([own[0].grad], [plain[0].grad])


@promise("``autograd.grad`` gives gradients of input and weights, and accumulates none.", **LOSS)
def grad_of_leaves(make):
    model, layers, plain, own = pair(make)
    for k in (slice(None), slice(0, 1), slice(2, 4), slice(-1, None)):
        wanted = [plain[0], *layers.parameters()][k]
        expected = grad(plain_loss(layers, *plain), wanted)
        same(grad(model.loss(*own), [own[0], *model.layers.parameters()][k]), expected)
    assert not [*filter(torch.is_tensor, [own[0].grad, *model.grads.values()])]


@promise("``backward(inputs=...)`` gives gradients to some leaves alone.", **LOSS)
def some_leaves(make):
    model, layers, plain, own = pair(make)
    plain_loss(layers, *plain).backward(inputs=[plain[0], layers[2].weight])
    model.loss(*own).backward(inputs=[own[0], model.layers[2].weight])
    assert_same_grads(model, layers)
    same([own[0].grad], [plain[0].grad])


class Rows(nn.Module):
    """A layer that counts rows in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += len(x)
        return x.sin()


@promise("Backward may run again if the graph is retained, and else says so.", **GRAPH)
def retained(make):
    model, layers, plain, own = pair(make, nn.Sequential(*linears(6, 6), Rows(), nn.Linear(6, 6)))
    losses = plain_loss(layers, *plain), model.loss(*own)
    for loss in losses:
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    assert_same_grads(model, layers)
    assert_same_buffers(model, layers)
    assert "second time" in model.raised(losses[1].backward).text


@promise("Gradients have gradients, as in a gradient penalty.", **GRAPH)
def penalty(make):
    inner = nn.Sequential(Own(), Rows())
    model, layers, plain, own = pair(make, nn.Sequential(*linears(6, 6), inner, nn.Linear(6, 6)))
    for loss, leaves in (
        (plain_loss(layers, *plain), [plain[0]]),
        (model.loss(*own), [own[0]]),
        (plain_loss(layers, *plain), [*layers.parameters()]),
        (model.loss(*own), [*model.layers.parameters()]),
    ):
        found = grad(loss, leaves, create_graph=True)
        (loss + sum(x.square().sum().to(loss.device) for x in found)).backward()
    assert_same_grads(model, layers)
    assert_same_buffers(model, layers)
    same([own[0].grad], [plain[0].grad])


@promise("``autograd.functional`` gives Jacobians.", **LOSS)
def jacobians(make):
    model, layers, plain, own = pair(make)
    expected = jacobian(lambda x: plain_loss(layers, x, plain[1]), plain[0])
    same([jacobian(lambda x: model.loss(x, own[1]), own[0], strict=True)], [expected])


@promise("Several gradients may be computed at once.", **GRAPH)
def batched(make):
    model, layers, plain, own = pair(make)
    given = torch.tensor([1.0, -2.0])
    wanted = [own[0], *model.layers.parameters()]
    loss = model.loss(*own)
    found = grad(loss, wanted, given.to(loss.device), is_grads_batched=True)
    expected = grad(plain_loss(layers, *plain), [plain[0], *layers.parameters()])
    same(found, [torch.stack([x, -2 * x]) for x in expected])


@promise("Derivatives of any order are right, and those of ``autograd.functional``.", **GRAPH)
def orders(make):
    model, layers, plain, own = pair(make)
    found = []
    for loss, (x, y) in ((partial(plain_loss, layers), plain), (model.loss, own)):
        found.append([hessian(lambda x, loss=loss, y=y: loss(x, y), x, vectorize=True)])
        value = loss(x, y)
        for _ in range(3):
            (last,) = grad(value, x, create_graph=True)
            value = last.square().sum()
        found[-1].append(last)
    same(found[1], found[0])


@promise("Sparse gradients of embeddings are sparse.", modes=True, eager=True)
def sparse(make):
    layers = nn.Sequential(nn.Embedding(9, 6, sparse=True), *linears(6, 6, 6))
    model = make(layers)
    index, y = torch.tensor([1, 7, 1, 3, 0, 8, 1, 2]), torch.rand(8, 6)
    plain_step(layers, index, y)
    model.step(index, y)
    grads = model.grads
    assert grads["0.weight"].is_sparse
    torch.testing.assert_close(
        {name: x.to_dense() for name, x in grads.items()},
        {name: x.grad.to_dense() for name, x in layers.named_parameters()},
    )


class Square(torch.autograd.Function):
    """A function that saves its input and its output, and takes a number."""

    @staticmethod
    def forward(ctx, x, factor):
        y = factor * x * x
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        ctx.mark_non_differentiable(found := y > 1)
        ctx.set_materialize_grads(False)
        return y, found

    @staticmethod
    def backward(ctx, grad, none):
        x, y = ctx.saved_tensors
        assert none is None
        return 2 * ctx.factor * x * grad + 0 * y, None


class Own(nn.Module):
    """A layer that applies a custom function."""

    def forward(self, x):
        return Square.apply(x, 0.5)[0] + 1


@promise("Layers may apply functions with a backward of their own.", modes=True, devices=True)
def functions(make):
    layers = nn.Sequential(Own(), *linears(6, 6), Own(), *linears(6, 6), Own())
    model, layers, plain, own = pair(make, layers)
    plain_step(layers, *plain)
    model.step(*own)
    assert_same_grads(model, layers)
    same([x for x in model.all([own[0].grad]) if x is not None], [plain[0].grad])


class Split(nn.Module):
    """A last layer with several outputs, of which a loss may take one."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return {"tanh": self.used(x).tanh(), "parts": [self.unused(x), x.exp()], "kind": "several"}


@promise(
    "A loss may use one of several outputs; a weight it does not depend on gets no gradient.",
    modes=True,
)
def one_of_several(make):
    def loss(output, target):
        return F.mse_loss(output["tanh"], target)

    model, layers, plain, own = pair(make, nn.Sequential(*linears(6, 6), Split()), loss=loss)
    plain_step(layers, *plain, loss=loss)
    model.step(*own)
    assert layers[2].unused.weight.grad is None
    assert_same_grads(model, layers)


@promise(
    "A loss of what a layer has in between, kept by a hook, gives its gradients.",
    otherwise={**WITHIN, "Pipe": ONCE},
    modes=True,
    devices=True,
    eager=True,
)
def hidden(make):
    model, layers, plain, own = pair(make)
    found, grads = [], []
    for some in (layers, model.layers):
        for k in (1, 3):
            some[k].register_forward_hook(
                lambda _, args, out: None if is_recomputing() else found.append(out)
            )
        for use in ("alone", "beside the loss", "as leaves"):
            found.clear()
            loss = plain_loss(layers, *plain) if some is layers else model.loss(*own)
            if use == "as leaves":
                grads.append(sum(x.abs().sum().cpu() for x in grad(loss, found)))
                continue
            terms = [x.square().mean().cpu() / len(found) for x in found]
            (sum(terms) + (0 if use == "alone" else loss.cpu())).backward()
    assert_same_grads(model, layers)
    same(grads[1:], grads[:1])


class Infinite(nn.Module):
    """A layer whose gradient is no number where its input is zero."""

    def forward(self, x):
        return (x * 0).sqrt() * 0 + x


@promise(
    "Anomaly mode names the function whose gradient is no number, and changes no gradient.",
    modes=True,
    fails=True,
    eager=True,
)
def anomaly(make):
    model, layers, plain, own = pair(make)
    plain_step(layers, *plain)
    with torch.autograd.set_detect_anomaly(True):
        model.step(*own)
    assert_same_grads(model, layers)
    model, _, _, own = pair(make, nn.Sequential(*linears(6, 6), Infinite(), *linears(6, 6)))
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(RuntimeError, match="returned nan values in its 0th output"),
        torch.autograd.set_detect_anomaly(True),
    ):
        model.step(*own)


# Forward mode and transforms.


@contextmanager
def scripting():
    """PyTorch scripts functions for forward mode, and newer versions warn of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        yield


@promise(
    "Forward-mode differentiation is an error that says what to do, and no wrong number.",
    modes=True,
)
def tangents(make):
    model, layers, _, own = pair(make, nn.Sequential(*linears(6, 6), Rows(), nn.Linear(6, 6)))
    with scripting(), forward_ad.dual_level():
        dual = forward_ad.make_dual(own[0].detach(), torch.ones_like(own[0]))
        for call in (model.forward, model.step):
            raised = model.raised(call, dual, *own[1:] if call == model.step else ())
            assert raised, "no error"
            assert "cannot be differentiated in forward mode" in raised.text, raised
        for k, x in (*layers.named_parameters(), *layers.named_buffers()):
            given = {k: forward_ad.make_dual(x.detach(), x.detach())}
            assert "in forward mode" in model.raised(model.loss_with, given, *own).text
        # Another dual level than the model's.
        trained(model, layers)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(f)(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x])),
    "vmap of nothing": lambda f, x: torch.func.vmap(lambda y: f(x) * y)(torch.ones(2)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(f)(x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "forward mode": lambda f, x: jacobian(f, x, vectorize=True, strategy="forward-mode"),
}


@promise("Transforms of ``torch.func`` are an error that says what to do.")
def transforms(make):
    model, layers, _, own = pair(make)
    for k, (name, transform) in enumerate(TRANSFORMS.items()):
        model.train(k % 2 == 0)
        for f, x in (
            (lambda x: model.forward(x).sum(), own[0]),
            (lambda x: model.step(x, own[1]), own[0]),
            (lambda x: model.loss_with({"0.weight": x}, *own), layers[0].weight),
        ):
            with scripting():
                raised = model.raised(transform, f, x.detach())
            assert raised, f"no error in {name}"
            assert "a wrapped model cannot be" in raised.text, (name, raised)
    trained(model.train(), layers)


@promise("``functional_call`` takes other parameters and buffers, all of them or some.", **LOSS)
def other_tensors(make):
    model, layers, plain, own = pair(make, nn.Sequential(*linears(6, 6), Rows(), nn.Linear(6, 6)))
    names = [name for name, _ in layers.named_parameters()]
    for some in (names, names[1:3]):
        found = []
        for loss_with in (partial(functional_call, layers), model.loss_with):
            torch.manual_seed(0)
            leaves = {name: torch.rand(6).requires_grad_() for name in some}
            shapes = {name: layers.get_parameter(name).shape for name in some}
            given = {name: (x * 2).tanh().expand(shapes[name]) for name, x in leaves.items()}
            given["2.rows"] = rows = torch.zeros(())
            if loss_with == model.loss_with:
                loss = loss_with(given, *own)
            else:
                loss = F.mse_loss(loss_with(given, (plain[0],)), plain[1])
            # Long after the own tensors are back in their places.
            loss.backward()
            found.append([leaf.grad for leaf in leaves.values()])
            # On another device there is a copy.
            assert rows == 8 or model.first.type != "cpu"
        torch.testing.assert_close(*found)
    # Those that were not replaced have their own.
    assert_same_grads(model, layers)
    assert not any(model.buffers.values())
