"""Deferred batch normalisation: running statistics as of whole mini-batches."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from torchgpipe import GPipe
from torchgpipe.batchnorm import DeferredBatchNorm, Moments

convert = DeferredBatchNorm.convert_deferred_batch_norm

NORMS = {nn.BatchNorm1d: (3,), nn.BatchNorm2d: (3, 4, 4), nn.BatchNorm3d: (3, 2, 2, 2)}


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def batch(kind, rows, device, seed=0):
    """A batch far from normalised values, so that lost digits show."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, *NORMS[kind], generator=generator) * 3 + 10).to(device)


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


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("kind", NORMS)
def test_statistics_of_the_mini_batch(kind, affine, momentum, checkpoint, device):
    """Statistics are right over several steps, with another number of micro-batches in each."""
    plain = kind(3, affine=affine, momentum=momentum).to(device)
    model = GPipe(
        nn.Sequential(copy.deepcopy(plain), nn.Tanh()),
        [1, 1],
        devices=[device] * 2,
        chunks=4,
        checkpoint=checkpoint,
        deferred_batch_norm=True,
    )
    for step, (rows, chunks) in enumerate([(16, 8), (9, 3), (11, 4), (4, 2), (8, 4)]):
        model.chunks = chunks
        x = batch(kind, rows, device, step).requires_grad_()
        plain(x)
        model(x).sum().backward()
        for name, buffer in plain.named_buffers():
            assert close(buffer, dict(model[0].named_buffers())[name]), (step, name)
    assert model[0].num_batches_tracked.item() == 5
    plain.eval(), model.eval()
    x = batch(kind, 6, device)
    assert close(plain(x).tanh(), model(x))


def deferring(norm, chunks):
    """Wrap a copy of a norm alone, with deferred statistics."""
    layers = nn.Sequential(copy.deepcopy(norm))
    return GPipe(layers, [1], devices=["cpu"], chunks=chunks, deferred_batch_norm=True)


@pytest.mark.parametrize("rows", [4, 6, 7])
def test_fewer_micro_batches_than_chunks(rows):
    """Micro-batches of one row have length 2, since a norm needs more than one value."""
    plain = nn.BatchNorm1d(3)
    model = deferring(plain, 64)
    x = torch.rand(rows, 3, 2)
    plain(x), model(x)
    assert close(plain.running_mean, model[0].running_mean)
    assert close(plain.running_var, model[0].running_var)
    assert model[0].num_batches_tracked.item() == 1


@pytest.mark.parametrize("kind", NORMS)
def test_normalises_micro_batches(kind, device):
    """Output and gradients are those of the plain norm on the micro-batches."""
    plain = kind(3).to(device)
    model = GPipe(
        nn.Sequential(copy.deepcopy(plain)),
        [1],
        devices=[device],
        chunks=2,
        checkpoint="always",
        deferred_batch_norm=True,
    )
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


def test_step_after_a_failure():
    class Fail(nn.Module):
        fail = True

        def forward(self, x):
            if self.fail and x[0, 0] > 0:
                raise KeyError
            return x

    plain = nn.BatchNorm1d(1)
    fail = Fail()
    model = GPipe(
        nn.Sequential(copy.deepcopy(plain), fail),
        [1, 1],
        devices=["cpu"] * 2,
        chunks=3,
        deferred_batch_norm=True,
    )
    x = torch.randn(9, 1) * 5
    with pytest.raises(KeyError):
        model(x)
    assert model[0].num_batches_tracked.item() == 0
    fail.fail = False
    model(x), plain(x)
    assert close(model[0].running_var, plain.running_var)
    # And by itself.
    with torch.no_grad():
        model.module(x), plain(x)
    assert close(model[0].running_mean, plain.running_mean)


def test_empty_mini_batch():
    model = GPipe(nn.Sequential(nn.BatchNorm2d(3)), [1], devices=["cpu"], deferred_batch_norm=True)
    model(torch.empty(0, 3, 2, 2))
    assert model[0].running_mean.tolist() == [0, 0, 0]


def test_micro_batch_of_a_single_value_is_torch_s_error():
    model = GPipe(
        nn.Sequential(nn.BatchNorm1d(3)), [1], devices=["cpu"], chunks=2, deferred_batch_norm=True
    )
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(torch.rand(2, 3))


def test_dimensions_are_checked():
    with pytest.raises(ValueError, match="expected 4D input"):
        convert(nn.BatchNorm2d(3))(torch.rand(2, 3))


# Conversion.


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
    model = GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=4, deferred_batch_norm=True)
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
        GPipe(
            nn.Sequential(other, nn.Sequential(norm)),
            [2],
            devices=["cpu"],
            deferred_batch_norm=True,
        )
    assert type(other) is nn.BatchNorm1d


def test_parametrised_after_the_conversion():
    norm = weight_norm(convert(nn.BatchNorm1d(2)), dim=None)
    GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=4)(torch.rand(8, 2))
    assert norm.num_batches_tracked.item() == 1


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
    model = GPipe(
        nn.Sequential(norm),
        [1],
        devices=["cpu"],
        chunks=3,
        checkpoint="always",
        deferred_batch_norm=asked,
    )
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
    """As in 0.0.7: so many runs in training are one mini-batch."""
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
    """Runs that are no whole mini-batch, before a step, do not count in it."""
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


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_wrapper_within_a_wrapper(checkpoint):
    """The outermost one collects."""
    norm = DeferredBatchNorm(2)
    inner = GPipe(nn.Sequential(norm), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint)
    outer = GPipe(nn.Sequential(inner), [1], devices=["cpu"], chunks=2, checkpoint=checkpoint)
    plain = nn.BatchNorm1d(2)
    for _ in range(2):
        x = torch.rand(16, 2, requires_grad=True)
        outer(x).sum().backward(), plain(x)
    assert norm.num_batches_tracked.item() == 2
    assert close(norm.running_var, plain.running_var)


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


@pytest.mark.parametrize("chunks", [0, -1, 2.5, None])
def test_chunks_that_are_none(chunks):
    for make in (
        lambda: convert(nn.BatchNorm1d(2), chunks),
        lambda: DeferredBatchNorm(2, chunks=chunks),
    ):
        with pytest.raises(ValueError, match="chunks must be a positive integer"):
            make()


def test_wrapped_again_without():
    """A layer stays deferred, and every wrapper collects."""
    layers = nn.Sequential(nn.BatchNorm1d(2))
    GPipe(layers, [1], devices=["cpu"], chunks=4, deferred_batch_norm=True)
    GPipe(layers, [1], devices=["cpu"], chunks=4)(torch.rand(8, 2))
    assert layers[0].num_batches_tracked.item() == 1


def test_double_precision():
    plain = nn.BatchNorm1d(3).double()
    model = deferring(plain, 4)
    x = torch.randn(32, 3, dtype=torch.double) + 1e3
    plain(x), model(x)
    for a, b in zip(plain.buffers(), model[0].buffers()):
        assert torch.allclose(a, b, rtol=1e-12)


def test_only_if_asked_for():
    model = GPipe(nn.Sequential(nn.BatchNorm1d(2)), [1], devices=["cpu"])
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies(duplicate):
    model = GPipe(
        nn.Sequential(nn.BatchNorm1d(2)), [1], devices=["cpu"], chunks=2, deferred_batch_norm=True
    )
    model(torch.rand(4, 2))
    twin = duplicate(model)
    x = torch.rand(4, 2)
    model(x), twin(x)
    assert twin[0].num_batches_tracked.item() == 2
    for a, b in zip(model.buffers(), twin.buffers()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_norm_that_some_micro_batches_bypass(checkpoint):
    """Stochastic depth does so: the statistics are of the micro-batches that the norm has seen."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x):
            return self.norm(x) if x[0, 0] > 0 else x * 1

    model = GPipe(
        nn.Sequential(Sometimes()),
        [1],
        devices=["cpu"],
        chunks=3,
        checkpoint=checkpoint,
        deferred_batch_norm=True,
    )
    x = torch.rand(6, 2) + 1
    x[2:4] = -1
    model(x.requires_grad_()).sum().backward()
    plain = nn.BatchNorm1d(2)
    plain(torch.cat([x[:2], x[4:]]))
    norm = model[0].norm
    assert norm.num_batches_tracked.item() == 1
    assert close(norm.running_mean, plain.running_mean)
    assert close(norm.running_var, plain.running_var)


def test_norm_that_comes_twice_is_updated_once():
    norm = nn.BatchNorm1d(2)
    model = GPipe(
        nn.Sequential(norm, norm), [2], devices=["cpu"], chunks=2, deferred_batch_norm=True
    )
    model(torch.rand(8, 2))
    assert norm.num_batches_tracked.item() == 1


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_half_precision(dtype):
    """Sums of squares do not fit into half precision."""
    plain = nn.BatchNorm2d(2).to(dtype)
    model = deferring(plain, 4)
    x = (torch.randn(32, 2, 64, 64) * 4 + 1).to(dtype)
    plain(x), model(x)
    for a, b in zip(plain.buffers(), model[0].buffers()):
        assert torch.allclose(a.float(), b.float(), rtol=0.02)


def test_recomputation_beside_another_forward_is_not_counted():
    """One thread may run backward while another one runs forward."""
    model = GPipe(
        nn.Sequential(nn.BatchNorm1d(2)),
        [1],
        devices=["cpu"],
        chunks=2,
        checkpoint="always",
        deferred_batch_norm=True,
    )
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
    model = GPipe(nn.Sequential(nn.BatchNorm1d(2)), [1], devices=["cpu"], deferred_batch_norm=True)
    assert set(model.state_dict()) == keys
    assert model.load_state_dict(state) == ([], [])
