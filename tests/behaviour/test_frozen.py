"""Frozen layers: a step recomputes them only if a gradient needs what they save."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.support import structures
from tests.support.helpers import plain

CHUNKS = 3


class Counted(nn.Module):
    """A layer that counts its runs."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.layers(x)


def linear():
    """A layer whose backward needs only its input and its weight, which exist anyway."""
    return Counted(nn.Linear(3, 3))


def saving():
    """A layer whose backward needs what it computed."""
    return Counted(nn.Linear(3, 3), nn.Tanh())


def frozen(layer):
    return layer.requires_grad_(False)


wrap = partial(structures.model, chunks=CHUNKS)


def runs(model):
    """Number of runs of each layer since the last call."""
    found = [layer.runs for layer in model]
    for layer in model:
        layer.runs = 0
    return found


def again(mode):
    """Number of runs of a recomputed layer."""
    return CHUNKS + {"never": 0, "except_last": CHUNKS - 1, "always": CHUNKS}[mode]


def step(run, x, parameters):
    """The output, and the gradients of the input and of all trained parameters."""
    output = run(x)
    leaves = [leaf for leaf in [x, *parameters] if leaf.requires_grad]
    if not output.requires_grad:
        return output, ()
    return output, torch.autograd.grad(output.square().sum(), leaves, allow_unused=True)


def verify(model, requires_grad=False):
    """Check that a wrapper computes what the plain model does; return the runs of each layer."""
    x = torch.rand(2 * CHUNKS, 3, requires_grad=requires_grad)
    reference = copy.deepcopy(model.module)
    expected = step(lambda x: plain(reference, x, model.chunks), x, reference.parameters())
    runs(model)
    found = step(model, x, model.parameters())
    assert torch.equal(found[0], expected[0])
    assert found[0].requires_grad == expected[0].requires_grad
    for a, b in zip(found[1], expected[1]):
        torch.testing.assert_close(a, b)
    return runs(model)


def test_nothing_to_train_but_the_input(mode):
    layers = [frozen(linear()), frozen(saving()), frozen(linear())]
    found = verify(wrap(*layers, mode=mode), requires_grad=True)
    assert found == [CHUNKS, again(mode), CHUNKS]


def test_frozen_behind_what_is_trained(mode):
    """The gradient passes through frozen layers, some of which need only their weights for it."""
    layers = [saving(), frozen(linear()), frozen(saving()), frozen(linear())]
    assert verify(wrap(*layers, mode=mode)) == [again(mode), CHUNKS, again(mode), CHUNKS]
    # Layers of one partition are computed again together, as far as is needed.
    for balance, second in (([1, 3], again(mode)), ([1, 1, 2], CHUNKS)):
        found = verify(wrap(*layers, balance=balance, mode=mode))
        assert found == [again(mode), second, again(mode), CHUNKS]


def test_frozen_layers_of_many_sorts(mode):
    """All of these layers save at most weights."""
    layers = [
        saving(),
        frozen(Counted(nn.Linear(3, 4, bias=False), nn.Identity(), nn.Unflatten(1, (2, 2)))),
        frozen(Counted(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 2))),
        Counted(nn.ZeroPad1d(1), nn.Flatten()),
    ]
    assert verify(wrap(*layers, mode=mode)) == [again(mode), CHUNKS, CHUNKS, CHUNKS]


def test_only_some_gradients_are_asked_for(mode):
    """Layers that lead only to other gradients do not run again."""
    model = wrap(saving(), saving(), saving(), mode=mode)
    x = torch.rand(2 * CHUNKS, 3)
    for j in range(3):
        some = list(model[j].parameters())
        expected = torch.autograd.grad(plain(model.module, x, CHUNKS).sum(), some)
        runs(model)
        found = torch.autograd.grad(model(x).sum(), some)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b)
        assert runs(model) == [CHUNKS] * j + [again(mode)] * (3 - j)


@pytest.mark.parametrize("replaced", [True, False], ids=["weight replaced", "bias changed"])
def test_frozen_tensors_that_backward_has_or_does_not_need(replaced, mode):
    model = wrap(saving(), frozen(linear()), mode=mode)
    x = torch.rand(2 * CHUNKS, 3)
    parameters = list(model[0].parameters())
    expected = torch.autograd.grad(plain(model.module, x, CHUNKS).sum(), parameters)
    output = model(x).sum()
    if replaced:
        model[1].layers[0].weight = nn.Parameter(torch.zeros(3, 3), requires_grad=False)
    else:
        with torch.no_grad():
            model[1].layers[0].bias.add_(1)
    for a, b in zip(torch.autograd.grad(output, parameters), expected):
        torch.testing.assert_close(a, b)
