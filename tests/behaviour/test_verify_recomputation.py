"""verify_recomputation() reports values that differ from the forward's, and no others."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.support.helpers import Apply, note_of, wrap
from tests.support.recomputation import Differs, numbered
from torchgpipe import verify_recomputation

VALUES = {
    "other values": (lambda x: (x + 1).sin(), lambda x: (x + 2).sin()),
    "NaN": (lambda x: (x + 1).sin(), lambda x: (x + torch.nan).sin()),
    "an integer": (
        lambda x: x.gather(1, torch.zeros(len(x), 1, dtype=torch.long)) * x,
        lambda x: x.gather(1, torch.ones(len(x), 1, dtype=torch.long)) * x,
    ),
    "a mask": (lambda x: x.where(x > 0, x * 2), lambda x: x.where(x > 9, x * 2)),
}


@pytest.mark.parametrize("name", VALUES)
def test_other_values_are_found(name):
    model = wrap([nn.Identity(), Differs(*VALUES[name], rows=1)], balance=[1, 1])
    with verify_recomputation():
        loss = model(numbered()).sum()
    with pytest.raises(RuntimeError, match=r"compute the same values as .*layer: 1, ") as caught:
        loss.backward()
    assert note_of(caught.value) == "raised in partition 1, micro-batch 1, layer 1 (Differs)"
    # Values are compared only within the block.
    model(numbered()).sum().backward()


def test_counter_that_is_not_held_back_is_found():
    class Noise(nn.Module):
        step = 0

        def forward(self, x):
            self.step += 1
            return (x + self.step).exp()

    model = wrap([Noise()])
    with verify_recomputation(), pytest.raises(RuntimeError, match="must compute the same values"):
        model(numbered()).sum().backward()


class NaN(nn.Module):
    def forward(self, x):
        return (x + torch.tensor([torch.nan, torch.inf], device=x.device)).sin() + x.exp()


EQUAL = {
    "NaN": lambda: [NaN(), nn.Linear(2, 2)],
    "dropout": lambda: [nn.Dropout(0.5), nn.Linear(2, 2), nn.AlphaDropout(0.3)],
    "batch norm": lambda: [nn.BatchNorm1d(2), nn.Tanh(), nn.BatchNorm1d(2, momentum=None)],
    "instance norm": lambda: [Rows(nn.InstanceNorm1d(2, track_running_stats=True)), nn.Tanh()],
    "in place": lambda: [nn.ReLU(inplace=True), nn.Linear(2, 2), nn.ELU(inplace=True)],
    "attention": lambda: [Attention(), nn.GRU(2, 2, batch_first=True), First()],
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(2, 1, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Rows(nn.Module):
    """A layer for sequences, applied to rows, each of which becomes a sequence of two values."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.unsqueeze(2) * torch.ones(2, device=x.device))[..., 0]


class First(nn.Module):
    def forward(self, value):
        return value[0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_pass(name, autocast, mode, device):
    layers = EQUAL[name]()
    model = wrap(layers, device, mode, balance=[1, len(layers) - 1])
    x = torch.randn(6, 2, device=device, requires_grad=True)
    found = []
    for verification in (verify_recomputation(), nullcontext()):
        torch.manual_seed(1)
        with verification, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            output = model(x)
        found.append(torch.autograd.grad(output.float().sum(), [x, *model.parameters()]))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize(
    "make", [lambda: [nn.RReLU()], lambda: [nn.LSTM(64, 64, batch_first=True), First()]]
)
def test_value_that_is_written_after_it_was_saved_passes(make):
    """One layer writes its noise late, and the other never writes some bytes of its workspace."""
    layers = make()
    model = wrap(layers, balance=[len(layers)])
    junk = [torch.full((2, 64), 7.0) for _ in range(9)]
    del junk
    with verify_recomputation():
        model(torch.randn(6, 64, requires_grad=True)).sum().backward()


class Transcribe(nn.Module):
    """A layer that saves memory to which its kernel writes only in part."""

    def forward(self, x):
        logits = x.unflatten(1, (8, -1)).transpose(0, 1).log_softmax(2)
        lengths = torch.arange(1, len(x) + 1)
        targets = torch.ones(len(x), 4, dtype=torch.long)
        return nn.functional.ctc_loss(logits, targets, lengths + 4, lengths % 4 + 1)


def test_value_that_is_never_written_passes():
    layers = [nn.Linear(64, 64), Transcribe(), nn.Tanh()]
    model = wrap(layers, balance=[3])
    for _ in range(3):
        with verify_recomputation():
            model(torch.randn(6, 64)).sum().backward()
    assert not torch.are_deterministic_algorithms_enabled()


class Unpool(nn.Module):
    """A layer with an operator of which PyTorch has no deterministic algorithm."""

    def forward(self, x):
        pooled, indices = nn.functional.max_pool1d(x.exp(), 2, return_indices=True)
        return nn.functional.max_unpool1d(pooled, indices, 2).sin()


def test_operators_that_are_not_deterministic_are_no_warning():
    model = wrap([nn.Linear(4, 4), Unpool()])
    with verify_recomputation():
        model(torch.randn(6, 4)).sum().backward()


def test_settings_of_determinism_stay():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(torch.are_deterministic_algorithms_enabled())
            return x.exp()

    model = wrap([Look()])
    torch.use_deterministic_algorithms(True)
    try:
        with verify_recomputation():
            model(numbered()).sum().backward()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == 6
    assert all(seen)


def test_value_that_is_changed_after_the_forward_passes():
    model = wrap([nn.Linear(2, 2), Apply(torch.exp)])
    with verify_recomputation():
        output = model(torch.rand(6, 2))
    with torch.no_grad():
        output.mul_(2)
    output.sum().backward()


def test_double_backward_and_two_graphs_pass():
    model = wrap([nn.Linear(2, 2), nn.Tanh()], balance=[1, 1])
    x = torch.randn(6, 2, requires_grad=True)
    with verify_recomputation():
        outputs = [model(x), model(x * 2)]
    for output in outputs:
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        grad.square().sum().backward()
