"""Buffers that layers change in their forward: a recomputation finds what the first run found."""

import copy

import pytest
import torch
from torch import nn

from tests.contract.state_of_layers import Memory
from tests.support.changing_buffers import LAYERS, Average, Folded, OwnNorm, changing
from tests.support.helpers import plain, same_buffers, same_gradients, wrap
from torchgpipe import is_recomputing, verify_recomputation

M = 3


@pytest.fixture
def rows(device):
    return torch.randn(6, 4, device=device)


def verify_like_plain(module, model, rows, steps=3):
    """Compare some steps of a model with those of the plain module on the micro-batches."""
    for step in range(1, steps + 1):
        outputs = [plain(module, rows * step, M), model(rows * step)]
        torch.testing.assert_close(*outputs)
        same_buffers(module, model.module)
        for owner, output in zip((module, model), outputs):
            owner.zero_grad()
            output.square().sum().backward()
        same_buffers(module, model.module)
        same_gradients(module, model)


@pytest.mark.parametrize("name", LAYERS)
def test_two_forwards_before_their_backwards(name, mode, rows, device):
    module = changing(name).to(device)
    model = wrap(copy.deepcopy(module), device, mode)
    for run in (lambda x: plain(module, x, M), model):
        losses = [run(rows).sum(), run(rows * 2).square().sum()]
        for loss in losses:
            loss.backward()
    same_buffers(module, model.module)
    same_gradients(module, model)


@pytest.mark.parametrize("name", LAYERS)
def test_verification_finds_nothing(name, mode, rows, device):
    model = wrap(changing(name).to(device), device, mode)
    for _ in range(2):
        with verify_recomputation():
            model(rows).square().sum().backward()


def test_statistics_after_a_step_on_zeros(rows, device):
    """Such a step leaves a mean of zero as it is, and PyTorch counts no change of a later one."""
    module = nn.Sequential(Folded(OwnNorm()), nn.Tanh()).to(device)
    model = wrap(copy.deepcopy(module), device, "always")
    plain(module, rows * 0, M)
    model(rows * 0).sum().backward()
    verify_like_plain(module, model, rows)


def test_buffer_that_changes_in_a_later_micro_batch_first(mode, rows, device):
    class Late(Average):
        calls = 0

        def forward(self, x):
            if is_recomputing():
                return super().forward(x) if self.again.pop() else x / self.average.clone()
            self.calls += 1
            self.again = [self.calls > 1, *getattr(self, "again", [])]
            return super().forward(x) if self.calls > 1 else x / self.average.clone()

    module = nn.Sequential(nn.Linear(4, 4), Late("data"), nn.Linear(4, 4)).to(device)
    reference = copy.deepcopy(module)
    model = wrap(module, device, mode, balance=[3])
    plain(reference, rows, M).sum().backward()
    # Backward comes to the last micro-batch first.
    output = model(rows)
    module[1].again.reverse()
    if mode == "except_last":
        module[1].again.pop()
    output.sum().backward()
    same_gradients(reference, model)
    same_buffers(reference, model.module)


def test_inference_tensor_as_buffer(mode, rows, device):
    """Nobody counts the changes of such a tensor, nor can a layer change it in training."""
    with torch.inference_mode():
        scale = torch.full((), 2.0, device=device)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x):
            return (x + self.scale).exp()

    module = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4)).to(device)
    reference = copy.deepcopy(module[:1]), copy.deepcopy(module[2:])
    model = wrap(module, device, mode)
    for _ in range(2):
        expected = reference[1]((reference[0](rows) + 2).exp())
        torch.testing.assert_close(model(rows), expected)
        for loss in (model(rows).sum(), expected.sum()):
            loss.backward()
    for a, b in zip(model.parameters(), nn.Sequential(*reference).parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_buffer_with_a_gradient(mode, rows, device):
    module = nn.Sequential(nn.Linear(4, 4), Memory(), nn.Linear(4, 4)).to(device)
    verify_like_plain(module, wrap(copy.deepcopy(module), device, mode), rows, steps=1)


def test_lazy_layers_can_be_verified(mode, rows, device):
    module = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4)).to(device)
    model = wrap(module, device, mode)
    for step in (1, 2):
        with verify_recomputation():
            model(rows).sum().backward()
        assert module[1].num_batches_tracked == M * step


def test_buffer_that_a_layer_of_another_partition_reads(rows, device):
    """With one micro-batch the reader never sees the buffer change, and nobody is warned."""

    class Reader(nn.Module):
        def __init__(self, average):
            super().__init__()
            self.register_buffer("average", average)

        def forward(self, x):
            return (x * self.average.clone()).tanh()

    changes = Average("in place")
    layers = [nn.Linear(4, 4), changes, Reader(changes.average), nn.Linear(4, 4)]
    module = nn.Sequential(*layers).to(device)
    model = wrap(copy.deepcopy(module), device, "always", balance=[2, 2])
    model.chunks = 1
    reference = copy.deepcopy(module)
    for _ in range(3):
        for net in (reference, model):
            net.zero_grad()
            net(rows).sum().backward()
        same_gradients(reference, model)
        same_buffers(reference, model.module)
