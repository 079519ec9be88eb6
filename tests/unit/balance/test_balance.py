"""Balancing by profiling."""

import re
from functools import partial
from random import Random

import pytest
import torch
from torch import nn

from tests.support.helpers import notes_of
from torchgpipe import GPipe, NoChunk
from torchgpipe.balance import balance_by_size, balance_by_time


@pytest.mark.parametrize("seed", range(4))
def test_alike_layers_get_equal_shares(seed, monkeypatch):
    """A busy neighbour slows half of the samples down, by up to three times."""
    random = Random(seed)

    def sample(self):
        slow = random.choice([1.0, random.uniform(1, 3)])
        return 0.001 * slow, 0.002 * slow

    monkeypatch.setattr("torchgpipe.planner.sandbox.Sandbox.sample", sample)
    monkeypatch.setattr("torchgpipe.planner.sandbox.LEAST", 10)
    module = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)])
    found = balance_by_time(4, module, torch.rand(1, 2), timeout=0, device="cpu")
    assert found == [2, 2, 2, 2]


def test_by_size():
    layers = [nn.Linear(8, 8, bias=False) for _ in range(5)] + [nn.Linear(8, 40, bias=False)]
    module = nn.Sequential(*layers)
    x = torch.rand(1, 8)
    # The parameters of the last layer are as large as those of the other five together.
    assert balance_by_size(2, module, x, param_scale=100, device="cpu") == [5, 1]
    # And so is its output.
    many = torch.rand(1000, 8)
    assert balance_by_size(2, module, many, param_scale=0, device="cpu") == [5, 1]


def test_by_size_counts_what_is_kept():
    """A layer may keep more than it gives."""

    class Deep(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = x.exp()
            return x

    module = nn.Sequential(Deep(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    x = torch.rand(9, 4, requires_grad=True)
    assert balance_by_size(2, module, x, device="cpu") == [1, 3]


def test_by_size_of_a_micro_batch():
    """Activations decide for many rows, and parameters for a single one."""
    module = nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(64, 64))
    x = torch.rand(512, 64)
    assert balance_by_size(2, module, x, chunks=1, device="cpu") == [2, 2]
    assert balance_by_size(2, module, x, chunks=512, device="cpu") == [3, 1]


@pytest.mark.parametrize(
    "balance", [partial(balance_by_time, timeout=0.1), balance_by_size], ids=["time", "size"]
)
def test_is_a_balance(balance, device):
    module = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]).to(device)
    x = torch.rand(4, 3)
    for partitions in (1, 2, 5):
        found = balance(partitions, module, x, device=device)
        assert len(found) == partitions
        GPipe(module, found, devices=[device] * partitions)
    with pytest.raises(ValueError, match="layers: 5, partitions: 6"):
        balance(6, module, None, device=device)
    with pytest.raises(TypeError, match="module: Linear"):
        balance(1, nn.Linear(1, 1), None, device=device)


@pytest.mark.parametrize("chunks", [1, 2])
def test_sample_with_what_goes_whole(chunks):
    class Add(nn.Module):
        def forward(self, value):
            return value[0] + value[1]

    layers = nn.Sequential(Add(), nn.Linear(3, 3))
    sample = torch.rand(4, 3), NoChunk(torch.rand(1, 3))
    assert balance_by_time(2, layers, sample, timeout=0, device="cpu") == [1, 1]
    assert balance_by_size(2, layers, sample, chunks=chunks, device="cpu") == [1, 1]


@pytest.mark.parametrize("balance", [partial(balance_by_time, timeout=0), balance_by_size])
def test_first_layer_with_several_arguments(balance):
    class First(nn.Module):
        def forward(self, a, b, *, scale):
            return (a + b) * scale

    module = nn.Sequential(First(), nn.Linear(3, 3))
    a, b = torch.rand(4, 3), torch.rand(4, 3)
    assert balance(2, module, args=(a, b), kwargs={"scale": 2}, device="cpu") == [1, 1]
    assert balance(2, module, a, args=(b,), kwargs={"scale": 2}, device="cpu") == [1, 1]
    with pytest.raises(TypeError, match="must be an input of the first layer"):
        balance(2, module, device="cpu")
    with pytest.raises(TypeError, match=r"args must be a tuple .*\(args: Tensor\)"):
        balance(2, module, args=a, device="cpu")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError("x: can't allocate memory: y")]
)
@pytest.mark.parametrize(
    ("chunks", "note"),
    [(1, r"whole mini-batch .*chunks: 1\); pass the chunks"), (2, r"one micro-batch .*chunks: 2")],
)
def test_out_of_memory(error, chunks, note):
    class Big(nn.Module):
        def forward(self, x):
            raise type(error)(*error.args)

    with pytest.raises(type(error)) as caught:
        balance_by_size(1, nn.Sequential(Big()), torch.rand(4, 2), chunks=chunks, device="cpu")
    assert any(re.search(note, x) for x in notes_of(caught.value))
