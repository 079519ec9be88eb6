"""Conversion to deferred batch normalisation, and norms outside of a wrapper."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.helpers import wrap
from tests.support.norms import batch, close
from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm

convert = DeferredBatchNorm.convert_deferred_batch_norm


def test_conversion_keeps_everything():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.3)
            self.other = nn.Sequential(nn.BatchNorm1d(2, affine=False).eval(), nn.ReLU())

    block = Block()
    norm = block.norm
    calls = []
    norm.register_forward_hook(lambda *args: calls.append("hook"))
    norm.register_load_state_dict_pre_hook(lambda *args: calls.append("load"))
    norm.tag = "mine"
    keys, parameters = list(block.state_dict()), list(block.named_parameters())
    assert convert(block) is block
    assert block.norm is norm
    assert isinstance(block.norm, nn.BatchNorm2d)
    assert isinstance(block.norm, DeferredBatchNorm)
    assert isinstance(block.other[0], DeferredBatchNorm)
    assert list(block.state_dict()) == keys
    assert [(name, id(p)) for name, p in block.named_parameters()] == [
        (name, id(p)) for name, p in parameters
    ]
    assert (block.norm.training, block.other[0].training) == (True, False)
    assert (block.norm.eps, block.norm.momentum, block.norm.tag) == (1e-3, 0.3, "mine")
    block.norm(torch.rand(2, 3, 2, 2))
    assert calls == ["hook"]
    block.load_state_dict(block.state_dict())
    assert calls == ["hook", "load"]
    assert list(block.state_dict()) == keys
    assert convert(block.norm) is block.norm


def test_without_statistics_there_is_nothing_to_defer():
    norm = nn.BatchNorm1d(2, track_running_stats=False)
    assert convert(norm) is norm


class Scaled(nn.BatchNorm1d):
    """A constructor, a check, an attribute and a method of its own, and torch's forward."""

    def __init__(self, features, *, factor):
        super().__init__(features)
        self.factor = factor

    def _check_input_dim(self, input):
        super()._check_input_dim(input)
        if input.shape[1] != self.num_features:
            raise KeyError("features")

    def scaled(self, x):
        return self(x) * self.factor


def test_derived_classes_that_inherit_forward():
    norm = Scaled(2, factor=3)
    plain = copy.deepcopy(norm)
    model = wrap([norm], chunks=4, deferred_batch_norm=True)
    assert isinstance(norm, Scaled)
    assert isinstance(norm, DeferredBatchNorm)
    x = torch.randn(16, 2) + 5
    plain(x), model(x)
    assert close(norm.running_mean, plain.running_mean)
    assert close(norm.running_var, plain.running_var)
    assert list(norm.state_dict()) == list(plain.state_dict())
    with pytest.raises(KeyError, match="features"):
        norm(torch.rand(2, 3))
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm)), type(norm)(2, factor=3)):
        assert type(twin) is type(norm)
        assert twin.eval().scaled(x).shape == x.shape


class Own(nn.BatchNorm1d):
    def forward(self, input):
        return super().forward(input) + 1


def replaced():
    norm = nn.BatchNorm1d(2)
    norm.forward = lambda x: x
    return norm


@pytest.mark.parametrize(
    ("norm", "why"),
    [
        (nn.SyncBatchNorm(2), "SyncBatchNorm, which exchanges .*deferred_batch_norm"),
        (nn.LazyBatchNorm1d(), "LazyBatchNorm1d, whose size .*run the model once"),
        (Own(2), "Own, which has a forward of its own.*inherit forward"),
        (replaced(), "BatchNorm1d, which has a forward of its own.*inherit forward"),
        (
            weight_norm(nn.BatchNorm1d(2), dim=None),
            "ParametrizedBatchNorm1d, whose class .*parametrise it then",
        ),
    ],
)
def test_others_are_an_error(norm, why):
    """The message says why not, and what to do."""
    other = nn.BatchNorm1d(2)
    with pytest.raises(TypeError, match=rf"can be deferred \(layer: 0\.1\.0, {why}"):
        wrap([other, nn.Sequential(norm)], balance=[2], deferred_batch_norm=True)
    assert type(other) is nn.BatchNorm1d


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: convert(nn.BatchNorm1d(2), 4),
        lambda: convert(nn.BatchNorm1d(2), chunks=4),
        lambda: convert(nn.BatchNorm1d(2)),
        lambda: DeferredBatchNorm(2, chunks=4),
        lambda: DeferredBatchNorm(2, 1e-5, 0.1, True, 4),
    ],
)
def test_deferred_before_wrapping(make, asked):
    """Every wrapper collects; the number of micro-batches is the wrapper's."""
    norm = make()
    model = wrap([norm], mode="always", deferred_batch_norm=asked)
    assert model[0] is norm
    plain = nn.BatchNorm1d(2)
    for step in range(3):
        x = batch(nn.BatchNorm1d, 9, "cpu", step)[:, :2].requires_grad_()
        model(x).sum().backward(), plain(x)
    assert norm.num_batches_tracked.item() == 3
    assert close(norm.running_mean, plain.running_mean)
    assert close(norm.running_var, plain.running_var)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    "make",
    [
        lambda plain: convert(copy.deepcopy(plain), 4),
        lambda plain: convert(convert(copy.deepcopy(plain), 2), 4),
        lambda plain: DeferredBatchNorm(3, momentum=plain.momentum, chunks=4),
    ],
)
def test_chunks_outside_of_a_wrapper(make, momentum):
    """Outside of a wrapper, `chunks` runs in training are one mini-batch, as in 0.0.7."""
    plain = nn.BatchNorm2d(3, momentum=momentum)
    norm = make(plain)
    for step in range(3):
        x = batch(nn.BatchNorm2d, 16, "cpu", step)
        parts = [norm(part) for part in x.chunk(4)]
        reference = nn.BatchNorm2d(3)
        assert torch.allclose(torch.cat(parts), torch.cat([reference(y) for y in x.chunk(4)]))
        plain(x)
        for name, buffer in plain.named_buffers():
            assert close(buffer, dict(norm.named_buffers())[name]), (step, name)
        norm.eval()(x), norm.train()
    norm(x)
    assert norm.num_batches_tracked.item() == 3


def test_wrapper_begins_anew():
    """A step does not count earlier runs that are no whole mini-batch."""
    norm = DeferredBatchNorm(2, chunks=2)
    norm(torch.rand(4, 2) + 100)
    plain = nn.BatchNorm1d(2)
    x = torch.rand(8, 2)
    GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=2)(x), plain(x)
    assert close(norm.running_mean, plain.running_mean)
    norm(x)
    assert norm.num_batches_tracked.item() == 1
    norm(x)
    assert norm.num_batches_tracked.item() == 2


@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 4, 4), (3, 2, 2, 2)])
def test_constructor_takes_any_number_of_dimensions(shape):
    norm = DeferredBatchNorm(3, eps=1e-3, momentum=0.2, affine=False)
    assert (norm.eps, norm.momentum, norm.affine, norm.chunks) == (1e-3, 0.2, False, 1)
    x = torch.rand(8, *shape)
    assert torch.equal(norm(x), nn.functional.batch_norm(x, None, None, training=True, eps=1e-3))
    assert norm.num_batches_tracked.item() == 1
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert torch.equal(twin.eval()(x), norm.eval()(x))
    with pytest.raises(ValueError, match=r"at least 2 dimensions \(input: \(3,\)\)"):
        norm(torch.rand(3))


def test_state_of_the_constructed_norm():
    plain = nn.BatchNorm1d(2)
    state = plain.state_dict()
    old = state | {"sum": torch.zeros(2), "sum_squares": torch.zeros(2)}
    norm = DeferredBatchNorm(2, chunks=4)
    assert list(norm.state_dict()) == list(state)
    assert norm.load_state_dict(old) == ([], [])


def test_wrong_chunks_convert_nothing():
    norm = nn.BatchNorm1d(2)
    with pytest.raises(ValueError, match="chunks must be a positive integer"):
        convert(norm, 0)
    assert type(norm) is nn.BatchNorm1d
    with pytest.raises(ValueError, match="chunks must be a positive integer"):
        convert(nn.ReLU(), 0)
