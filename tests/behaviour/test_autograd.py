"""Autograd gives the plain model's gradients for a wrapped model, through each of its functions."""

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

from tests.support.helpers import MODES, Plain
from torchgpipe import GPipe, is_recomputing

ROWS = 5


class Square(torch.autograd.Function):
    """A function that saves its input and its output, and defines its second derivative."""

    @staticmethod
    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        ctx.factor = 2
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return ctx.factor * x * grad + 0 * y


class Own(nn.Module):
    """A layer that applies a custom autograd function."""

    def forward(self, x):
        return Square.apply(x) + 1


class Split(nn.Module):
    """The last layer, of a model with several outputs."""

    def forward(self, x):
        return {"tanh": x.tanh(), "parts": [x[:, :1] * 2, x.exp()], "kind": "several"}


def layers():
    """Layers whose second derivative is not zero."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)
    ).double()


def compare(way, mode, device, make=layers, chunks=(2,), several=False):
    """Check that a function returns the same for a wrapped model and for the plain one."""
    n = len(make())
    balances = [[1, n - 2, 1], [n], [2, n - 2], [1] * n] if several else [[1, n - 2, 1]]
    for m in chunks:
        for balance in balances:
            x = torch.randn(ROWS, 3, dtype=torch.double, device=device)
            expected = way(Plain(make().to(device), m), x.clone().requires_grad_())
            wrapped = GPipe(
                make(), balance, devices=[device] * len(balance), chunks=m, checkpoint=mode
            )
            found = way(wrapped, x.clone().requires_grad_())
            assert any(value is not None and value.any() for value in expected)
            for a, b in zip(expected, found, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(b, a)


def grads(model, *others):
    return [leaf.grad for leaf in [*others, *model.parameters()]]


@pytest.fixture(params=MODES)
def mode(request):
    return request.param


def test_backward(mode, device):
    def way(model, x):
        model(x).square().sum().backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(1, 2, 5), several=True)


def test_grad_for_the_input_and_for_parameters(mode, device):
    def way(model, x):
        leaves = [x, *model.parameters()]
        found = [*torch.autograd.grad(model(x).square().sum(), leaves)]
        # One at a time, which needs no other.
        for leaf in leaves:
            found += torch.autograd.grad(model(x).square().sum(), leaf)
        assert grads(model, x) == [None] * len(leaves)
        return found

    compare(way, mode, device, chunks=(1, 3))


def test_gradient_of_the_output_that_is_given(mode, device):
    def way(model, x):
        output = model(x)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).view_as(output))
        return grads(model, x)

    compare(way, mode, device)


def test_two_backwards_of_one_graph(mode, device):
    def way(model, x):
        output = model(x)
        output[:, 0].sum().backward(retain_graph=True)
        output[:, 1].exp().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            output.square().sum().backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(1, 2, 5), several=True)


def test_gradient_penalty(mode, device):
    def way(model, x):
        output = model(x).square().sum()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        (output + grad.square().sum()).backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(1, 2, 5), several=True)


def test_penalty_on_the_gradients_of_parameters(mode, device):
    def way(model, x):
        output = model(x).square().sum()
        found = torch.autograd.grad(output, [*model.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in found).backward()
        return grads(model, x)

    compare(way, mode, device)


def test_third_derivative(mode, device):
    def way(model, x):
        found = model(x).square().sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(found, x, create_graph=True)
            found = grad.square().sum()
        return [grad, *torch.autograd.grad(found, [*model.parameters()], allow_unused=True)]

    compare(way, mode, device)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3), slice(-1, None)], ids=str)
def test_loss_of_some_rows(rows, mode, device):
    def way(model, x):
        model(x)[rows].square().sum().backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(2, 5))


@pytest.mark.parametrize("part", ["tanh", 0, 1])
def test_loss_of_one_of_several_outputs(part, mode, device):
    def way(model, x):
        outputs = model(x)
        output = outputs[part] if part == "tanh" else outputs["parts"][part]
        output.square().sum().backward()
        return grads(model, x)

    compare(way, mode, device, lambda: layers().append(Split()), chunks=(1, 3))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("layer", [1, 5])
def test_loss_of_what_a_layer_has_in_between(layer, alone, mode, device):
    """Gradients of an auxiliary loss, as in feature matching, do not come through the output."""

    def way(model, x):
        hidden = []
        model[layer].register_forward_hook(
            lambda module, args, output: None if is_recomputing() else hidden.append(output)
        )
        output = model(x)
        loss = sum(h.square().sum() for h in hidden)
        (loss if alone else loss + output.exp().sum()).backward()
        return grads(model, x)

    compare(way, mode, device, chunks=(1, 3))


def test_gradient_of_what_a_layer_has_in_between(mode, device):
    def way(model, x):
        hidden = []
        model[3].register_forward_hook(
            lambda module, args, output: None if is_recomputing() else hidden.append(output)
        )
        output = model(x)
        return torch.autograd.grad(output.square().sum(), hidden)

    compare(way, mode, device, chunks=(1, 3))


def test_gradient_accumulation(mode, device):
    def way(model, x):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            model(x * (step + 1)).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 1)
        return [x.grad, *model.parameters()]

    compare(way, mode, device, chunks=(1, 3))


def test_clipping(mode, device):
    def way(model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        norms = []
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        return [*norms, *grads(model), *model.parameters()]

    compare(way, mode, device, chunks=(1, 3))


def test_grad_scaler(mode, device):
    """One step overflows: the scaler skips the step, and halves the scale."""

    def way(model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        scales = []
        for factor in (1, torch.finfo(torch.double).max, 2):
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean() * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        assert scales[0] == 2 * scales[1]
        return [*scales, *model.parameters()]

    compare(way, mode, device, chunks=(1, 3))


def test_backward_for_some_leaves_alone(mode, device):
    def way(model, x):
        model(x).square().sum().backward(inputs=[x])
        found = grads(model, x)
        model(x).square().sum().backward(inputs=[model[3].weight, model[5].bias])
        return found + grads(model, x)

    compare(way, mode, device, chunks=(1, 3))


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian(vectorize, mode, device):
    compare(lambda model, x: [jacobian(model, x, vectorize=vectorize)], mode, device, chunks=(1, 3))


@pytest.mark.parametrize("vectorize", [False, True])
def test_hessian(vectorize, mode, device):
    def way(model, x):
        return [hessian(lambda x: model(x).square().sum(), x, vectorize=vectorize)]

    compare(way, mode, device)


def test_several_gradients_at_once(mode, device):
    def way(model, x):
        output = model(x)
        given = torch.eye(output.numel(), dtype=x.dtype, device=device)
        given = given.view(-1, *output.shape)
        leaves = [x, *model.parameters()]
        return torch.autograd.grad(output, leaves, given, is_grads_batched=True)

    compare(way, mode, device, chunks=(1, 3))


# Torch compiles decompositions for it.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: jacobian(model, x, vectorize=True, strategy="forward-mode"),
        lambda model, x: hessian(
            lambda x: model(x).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
        ),
    ],
    ids=["jacobian", "hessian"],
)
def test_forward_mode_is_an_error(function, mode):
    model = GPipe(layers(), [2, 4], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    with pytest.raises(RuntimeError, match="cannot be (called|differentiated)"):
        function(model, torch.rand(4, 3).double())


def test_a_layer_with_a_function_of_its_own(mode, device):
    def way(model, x):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(x).sum() + grad.square().sum()).backward()
        return [grad, *grads(model, x)]

    def make():
        return nn.Sequential(Own(), *layers()[:2], Own(), *layers()[3:]).double()

    compare(way, mode, device, make, chunks=(1, 3))


def test_sparse_gradients(mode, device):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(9, 3, sparse=True), *layers())

    def way(model, x):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        index = torch.tensor([1, 7, 1, 3, 0], device=device)
        model(index).square().sum().backward()
        assert model[0].weight.grad.is_sparse
        optimizer.step()
        return [p.detach() for p in model.parameters()]

    compare(way, mode, device, lambda: make().double())


def test_gradcheck(mode):
    """Finite differences, with undefined gradients, and with batches of gradients."""
    model = GPipe(layers(), [3, 3], devices=["cpu"] * 2, chunks=2, checkpoint=mode)
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(model, x, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(model, x, check_batched_grad=True, fast_mode=True)


def test_anomaly_mode(mode, device):
    def way(model, x):
        with torch.autograd.set_detect_anomaly(True):
            model(x).square().sum().backward()
        return grads(model, x)

    compare(way, mode, device)
