"""torch.func: other parameters for one call, and the transforms that cannot pass a wrapper."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

from tests.support.helpers import MODES, note_of, plain
from torchgpipe import GPipe, NoChunk

M = 3

# Torch compiles decompositions for forward-mode differentiation.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Plain(nn.Module):
    """The reference: the same layers, by the same names, on the micro-batches one after another."""

    def __init__(self, partitions):
        super().__init__()
        self.partitions = partitions

    def forward(self, x):
        return plain(lambda x: self.partitions[1](self.partitions[0](x)), x, M)


class Count(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        Count(), nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


@pytest.fixture
def wrapped(device):
    """A wrapper whose checkpoint mode is of no account."""
    return GPipe(layers(), [3, 2], devices=[device] * 2, chunks=M)


@pytest.fixture
def model(wrapped, mode):
    wrapped.checkpoint = mode
    return wrapped


@pytest.fixture
def models(model):
    """The plain model and the wrapped one."""
    return Plain(copy.deepcopy(model.partitions)), model


@pytest.fixture
def input(device):
    return torch.randn(7, 3, dtype=torch.double, device=device)


def replacements(model):
    torch.manual_seed(1)
    return {
        name: torch.rand_like(p.detach()).requires_grad_() for name, p in model.named_parameters()
    }


def same(a, b):
    torch.testing.assert_close(b, a)


# functional_call.


def test_replaced_buffer_with_a_gradient(models, input):
    """In eval mode a norm does not differentiate its statistics; another layer does."""

    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.zeros(2).double().to(input.device))

        def forward(self, x):
            return (x * self.shift.exp()).sin()

    found = []
    for model in models:
        model.partitions[1].append(Shift())
        leaf = torch.ones(2, dtype=torch.double, device=input.device, requires_grad=True)
        name = "partitions.1.2.shift"
        output = functional_call(model, {name: leaf * 3}, (input,))
        output.square().sum().backward()
        found.append([output.detach(), leaf.grad])
    assert found[1][1].all()
    same(*found)


def test_two_calls_before_their_backwards(models, input):
    """Meta learning does so: the second step takes what the first one computed."""
    found = []
    for model in models:
        leaves = replacements(model)
        loss = functional_call(model, leaves, (input,)).square().sum()
        grads = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
        stepped = {name: p - 0.1 * grad for (name, p), grad in zip(leaves.items(), grads)}
        other = functional_call(model, stepped, (input * 2,))
        again = functional_call(model, leaves, (input * 3,))
        (other.square().sum() + again.exp().sum()).backward()
        found.append([leaf.grad for leaf in leaves.values()])
    same(*found)


# Forward-mode differentiation.

NAMED = "cannot be differentiated in forward mode.*plain model"


@pytest.mark.parametrize(
    "place",
    [lambda x: x, lambda x: {"nested": [x, 1]}, lambda x: {"whole": NoChunk(x), "rows": x * 1}],
)
def test_dual_input_is_an_error(place, wrapped, input):
    for wrapped.checkpoint in MODES:
        for training, grad in product([True, False], repeat=2):
            wrapped.train(training)
            with forward_ad.dual_level(), torch.set_grad_enabled(grad):
                dual = forward_ad.make_dual(input, torch.ones_like(input))
                with pytest.raises(RuntimeError, match=NAMED):
                    wrapped(place(dual))
    assert wrapped[0].calls == 0, "no layer has run"


# Within a layer.


def cube(x):
    return (x**3).sum()


INSIDE = {
    "vmap": torch.func.vmap(lambda row: row.sin() * row.sum()),
    "grad": torch.func.grad(cube),
    "vmap of grad": torch.func.vmap(torch.func.grad(cube)),
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x).sum((0, 1)),
    "vjp": lambda x: torch.func.vjp(torch.sin, x)[1](x)[0],
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x.cos(),))[1],
}


class Inside(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


#: Transforms that save for a backward of their own, and that forbid hooks for saved tensors.
REVERSE = ["grad", "jacrev", "vjp", "vmap of grad"]


def step(model, input):
    x = input.clone().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return [output.detach(), x.grad, *[p.grad for p in model.parameters()]]


@pytest.mark.parametrize("name", INSIDE)
def test_layer_that_transforms_inside(name, mode, models, input):
    """Some transforms are an error under checkpointing, as in torch.utils.checkpoint."""
    for model in models:
        model.partitions[1].append(Inside(INSIDE[name]))
    reference, model = models
    if name in REVERSE and mode != "never":
        with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks") as caught:
            model(input)
        assert note_of(caught.value) == "raised in partition 1, micro-batch 0, layer 2 (Inside)"
        model.checkpoint = "never"
    same(step(reference, input), step(model, input))
