"""Random numbers of models of any layers, and in several threads.

The reference is a wrapper with a single partition, without checkpointing; with one chunk, the plain
model. ``tests/contract`` has what every wrapper promises.
"""

import copy
import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import MODES, wrap
from tests.support.size import some as sized
from torchgpipe.ambient.generators import get_state

WIDTH = 4


class Drawing(nn.Module):
    """A layer that computes with what it draws."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


class Attention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x)[0]


class LSTM(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


class Checkpointed(nn.Sequential):
    """A layer under torch.utils.checkpoint, too."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def some(x):
    """A layer that takes and repeats some features."""
    weights = torch.ones(WIDTH, device=x.device)
    return x[..., torch.multinomial(weights, WIDTH, replacement=True)]


#: Layers that draw, for inputs of shape (rows, 3, WIDTH).
LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "alpha dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.AlphaDropout(0.3)),
    "dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "rand_like": lambda: Drawing(lambda x: x + torch.rand_like(x)),
    "bernoulli": lambda: Drawing(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "normal_": lambda: Drawing(lambda x: x * torch.empty_like(x).normal_()),
    "randperm": lambda: Drawing(lambda x: x[..., torch.randperm(WIDTH, device=x.device)]),
    "multinomial": lambda: Drawing(some),
    "stochastic depth": lambda: Drawing(
        lambda x: x.tanh() if torch.rand((), device=x.device).item() < 0.5 else x
    ),
    "attention": lambda: Attention(WIDTH, 2, dropout=0.3, batch_first=True),
    "LSTM": lambda: LSTM(WIDTH, WIDTH, 2, dropout=0.4, batch_first=True),
    "checkpointed": lambda: Checkpointed(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
}


def draws_twice(name):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), LAYERS[name](), nn.Linear(WIDTH, WIDTH), LAYERS[name]()
    )


def step(model, x, *, seed=1):
    """The output, the gradients, and the state of the caller's generator after a step."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    output = model(x)
    state = get_state(x.device)
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    assert torch.equal(state, get_state(x.device))
    return [output, *gradients, state]


def same(found, expected):
    assert len(found) == len(expected)
    return all(map(torch.equal, found, expected))


def batch(device="cpu", rows=5):
    return torch.rand(rows, 3, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)


@st.composite
def models(draw):
    """A random module, and a random balance for it."""
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4))
    torch.manual_seed(0)
    layers = [x for name in names for x in (nn.Linear(WIDTH, WIDTH), LAYERS[name]())]
    ends = draw(st.sets(st.integers(1, len(layers) - 1), max_size=4))
    return nn.Sequential(*layers), [b - a for a, b in pairwise([0, *sorted(ends), len(layers)])]


@settings(max_examples=sized(30, 10))
@given(
    models(),
    st.sampled_from([1, 2, 3, 8]),
    st.sampled_from(MODES),
    st.integers(2, 9),
    st.integers(0, 2**64 - 1),
)
def test_same_in_random_models(model, chunks, mode, rows, seed):
    module, balance = model
    x = batch(rows=rows)
    reference = (
        module if chunks == 1 else wrap(module, mode="never", chunks=chunks, balance=[len(module)])
    )
    expected = step(reference, x, seed=seed)
    assert same(
        step(wrap(module, mode=mode, chunks=chunks, balance=balance), x, seed=seed), expected
    )


def draws_nothing():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])


@pytest.mark.parametrize("others", ["draws", "draws nothing"])
def test_wrappers_in_several_threads(others, mode):
    """Wrappers that draw share a generator, but no error blames one for the draws of another."""
    made = [draws_twice("dropout") if others == "draws" else draws_nothing(), draws_nothing()]
    reference = copy.deepcopy(made[1])
    x, errors, found = batch(), [], []
    before = torch.get_rng_state()

    def train(module):
        model = wrap(module, mode=mode, balance=[2, 2])
        try:
            for _ in range(6):
                output = model(x)
                output.square().sum().backward()
            found.append(output)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(m,), daemon=True) for m in made * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert errors == []
    assert (
        sum(torch.equal(output, wrap(reference, mode="never", balance=[4])(x)) for output in found)
        >= 2
    )
    if others == "draws nothing":
        assert torch.equal(before, torch.get_rng_state())


def test_numbers_go_on_after_hooks_that_draw(device):
    drawn = []

    def pack(x):
        drawn.append(torch.rand(1).item())
        return x

    layers = [Drawing(lambda x: x + torch.rand(())) for _ in range(2)]
    model = wrap(nn.Sequential(*layers), [device] * 2, "always", chunks=1)
    x = torch.ones(2, WIDTH, device=device)
    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda x: x):
        model(x).sum().backward()
    torch.manual_seed(0)
    # The first cell's layer and hook, then those of the second.
    numbers = [torch.rand(1).item() for _ in range(4)]
    assert drawn == numbers[1::2]
