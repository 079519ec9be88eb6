"""Copies, pickles, forks, and moves."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step
from tests.support.changing_buffers import Average
from tests.support.forks import in_child

SHARED = Otherwise(
    "Its processes and connections would not be there when it is loaded: save the state dict.",
    "cannot be pickled",
)


def pickled(model):
    """A copy through a pickle."""
    return pickle.loads(pickle.dumps(model))


def saved(model):
    """A copy through :func:`torch.save`."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def verify_twin(make, duplicate, layer=nn.Linear):
    """Check that a copy trains on its own, before the first step of the original and after it."""
    plain = nn.Sequential(layer(4, 4), Average("in place"), nn.Linear(4, 4), nn.Tanh())
    model = make(plain)
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    moved = x.to(model.first), y.to(model.last)
    for _ in range(2):
        twin = model.twin(duplicate)
        twin.zero_grad()
        before = {key: value.clone() for key, value in model.state.items()}
        assert twin.state.keys() == before.keys()
        expected = plain_step(plain, x, y, chunks=4)
        torch.testing.assert_close(twin.step(*moved).cpu(), expected)
        assert_same_grads(twin, plain)
        with torch.no_grad():
            for parameter in twin.model.parameters():
                parameter.zero_()
        twin.pipe.chunks = 2
        assert all(torch.equal(value, before[key]) for key, value in model.state.items())
        torch.testing.assert_close(model.step(*moved).cpu(), expected)
        assert model.pipe.chunks == 4
        plain.zero_grad()
        model.zero_grad()


@promise("A deep copy trains on its own, and leaves the original alone.", modes=True, devices=True)
def deep(make):
    verify_twin(make, copy.deepcopy)
    # A parametrised module copies all of its attributes in its own way.
    verify_twin(make, copy.deepcopy, lambda *sizes: weight_norm(nn.Linear(*sizes)))


@promise(
    "So does a pickle, and what torch.save() has saved.",
    otherwise={"Pipe": SHARED},
    modes=True,
    devices=True,
)
def pickles(make):
    verify_twin(make, pickled)
    verify_twin(make, saved)


@promise(
    "A forked process trains on, before and after steps of its parent, which goes on, too.",
    otherwise={
        "Pipe": Otherwise("A forked process has no connections of its own.", "without the pipeline")
    },
)
def forks(make):
    model = make(linears(4, 4, 4))
    x, y = torch.rand(8, 4), torch.rand(8, 4)

    def step():
        model.zero_grad()
        loss = model.step(x, y).item()
        return [loss, *[grad.tolist() for grad in model.grads.values()]]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        expected = None
        for _ in range(2):
            found = in_child(step)
            assert found == step() == (expected or found)
            expected = found


@promise("A model may change its dtype, and goes on with that.", modes=True, devices=True)
def dtypes(make):
    plain = linears(4, 4, 4)
    model = make(plain)
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.model.to(dtype)
        plain.to(dtype)
        model.zero_grad()
        plain.zero_grad()
        x, y = x.to(dtype), y.to(dtype)
        expected = plain_step(plain, x, y)
        torch.testing.assert_close(model.step(x.to(model.first), y.to(model.last)).cpu(), expected)
        assert_same_grads(model, plain)
    model.model.double()
    assert {value.dtype for value in model.state.values()} == {torch.float64}


@promise("Moving a model to another device is an error, also through a parent.", devices=True)
def moves(make):
    model = make(linears(4, 4, 4))
    before = {key: value.device for key, value in model.state.items()}
    for move in (
        lambda: model.model.to("meta"),
        lambda: model.model.to(device="meta", dtype=torch.float64),
        lambda: model.model.to_empty(device="meta"),
        lambda: nn.Sequential(model.model).to("meta"),
    ):
        with pytest.raises(TypeError, match=r"must stay on their devices.*moved; move"):
            move()
    assert {key: value.device for key, value in model.state.items()} == before
    x, y = torch.rand(8, 4, device=model.first), torch.rand(8, 4, device=model.last)
    assert model.step(x, y)
