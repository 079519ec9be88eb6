"""Deferred batch normalisation: running statistics as of whole mini-batches."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.helpers import wrap
from tests.support.norms import NORMS, batch, close
from torchgpipe.batchnorm import DeferredBatchNorm, Moments

convert = DeferredBatchNorm.convert_deferred_batch_norm


def deferring(*layers, chunks=4, mode="except_last", device="cpu"):
    """Wrap copies of layers, each in a partition, with deferred statistics."""
    return wrap([*copy.deepcopy(layers)], device, mode, chunks, deferred_batch_norm=True)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.floats(-100, 100))
def test_moments(sizes, offset):
    x = torch.randn(sum(sizes), 2, dtype=torch.double) + offset

    def moments(x):
        return Moments(len(x), x.mean(0), (x - x.mean(0)).square().sum(0))

    first, *rest = [moments(part) for part in x.split(sizes)]
    for other in rest:
        first = first.merged(other)
    assert first.size == len(x)
    assert torch.allclose(first.mean, moments(x).mean)
    assert torch.allclose(first.squares, moments(x).squares)


@pytest.mark.parametrize("kind", NORMS)
def test_normalises_micro_batches(kind, device):
    """Output and gradients are those of the plain norm on the micro-batches."""
    plain = kind(3).to(device)
    model = deferring(plain, chunks=2, mode="always", device=device)
    x = batch(kind, 8, device)
    expected = torch.cat([plain(part) for part in x.chunk(2)])
    output = model(x)
    assert torch.equal(expected, output)
    expected.square().sum().backward()
    output.square().sum().backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        assert close(p.grad, q.grad)


def test_outside_of_a_wrapper(device):
    plain = nn.BatchNorm1d(3).to(device)
    deferred = convert(copy.deepcopy(plain))
    for step in range(3):
        x = batch(nn.BatchNorm1d, 8, device, step)
        assert torch.equal(plain(x), deferred(x))
        for a, b in zip(plain.buffers(), deferred.buffers()):
            assert close(a, b)


def test_empty_mini_batch():
    model = deferring(nn.BatchNorm2d(3), chunks=1)
    model(torch.empty(0, 3, 2, 2))
    assert model[0].running_mean.tolist() == [0, 0, 0]


def test_micro_batch_of_a_single_value_is_torch_s_error():
    model = deferring(nn.BatchNorm1d(3), chunks=2)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.rand(2, 3))


def test_dimensions_are_checked():
    with pytest.raises(ValueError, match="expected 4D input"):
        convert(nn.BatchNorm2d(3))(torch.rand(2, 3))


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_norm_that_some_micro_batches_bypass(checkpoint):
    """Stochastic depth does so: the statistics are of the micro-batches that the norm has seen."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) if x[0, 0] > 0 else x * 1

    model = deferring(Sometimes(), chunks=3, mode=checkpoint)
    x = torch.rand(6, 2) + 1
    x[2:4] = -1
    model(x.requires_grad_()).sum().backward()
    plain = nn.BatchNorm1d(2)
    plain(torch.cat([x[:2], x[4:]]))
    norm = model[0].norm
    assert norm.num_batches_tracked.item() == 1
    assert close(norm.running_mean, plain.running_mean)
    assert close(norm.running_var, plain.running_var)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_half_precision(dtype):
    """Sums of squares do not fit into half precision."""
    plain = nn.BatchNorm2d(2).to(dtype)
    model = deferring(plain)
    x = (torch.randn(32, 2, 64, 64) * 4 + 1).to(dtype)
    plain(x), model(x)
    for a, b in zip(plain.buffers(), model[0].buffers()):
        assert torch.allclose(a.float(), b.float(), rtol=0.02)


def test_recomputation_beside_another_forward_is_not_counted():
    """One thread may run backward while another one runs forward."""
    model = deferring(nn.BatchNorm1d(2), chunks=2, mode="always")
    x, y = torch.rand(2, 8, 2)
    loss = model(x.requires_grad_()).sum()
    plain = copy.deepcopy(model.module)
    losses = [loss]

    def hook(*args):
        if losses:
            losses.pop().backward()

    model[0].register_forward_hook(hook)
    model(y), plain(y)
    assert model[0].num_batches_tracked.item() == 2
    assert close(model[0].running_mean, plain[0].running_mean)


def test_state_of_torchgpipe_0_0_7_loads():
    state = {
        f"partitions.0.{key}": x for key, x in nn.Sequential(nn.BatchNorm1d(2)).state_dict().items()
    }
    keys = set(state)
    state |= {"partitions.0.0.sum": torch.zeros(2), "partitions.0.0.sum_squares": torch.zeros(2)}
    model = deferring(nn.BatchNorm1d(2))
    assert set(model.state_dict()) == keys
    assert model.load_state_dict(state) == ([], [])
