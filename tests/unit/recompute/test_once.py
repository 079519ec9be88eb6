"""State that layers update once per mini-batch."""

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.support.changing_buffers import Average, Codebook
from tests.support.once import Centre, Contrast, Dino, Swapped
from torchgpipe import GPipe, MappedGPipe, OncePerMiniBatch, ScheduledLoss
from torchgpipe.recompute.once import _open, state_of, warn_of_changes
from torchgpipe.schedule import parse


def mean_of_squares(x):
    return x.square().mean()


def trained(plain, layers, step, count=3):
    """Check that steps do what they do with the plain model."""
    for k in range(count):
        x = torch.rand(6 + k, 4)
        mean_of_squares(plain(x)).backward()
        step(x).backward()
    for a, b in zip(plain.parameters(), layers.parameters(), strict=True):
        torch.testing.assert_close((a, a.grad), (b, b.grad))
    torch.testing.assert_close([*plain.buffers()], [*layers.buffers()])
    assert not _open


@pytest.mark.parametrize("cls", [Dino, Swapped])
@pytest.mark.parametrize("mode", ["never", "except_last", "always", "offload"])
@pytest.mark.parametrize("names", [("",), ("", "student", "teacher")], ids=str)
def test_the_model_of_a_map(cls, mode, names):
    plain = cls()
    where = dict.fromkeys(names, "cpu")
    model = MappedGPipe(copy.deepcopy(plain), where, chunks=3, checkpoint=mode)
    trained(plain, model, lambda x: mean_of_squares(model(x)))


def test_several_mini_batches_before_a_backward():
    plain = nn.Sequential(nn.Linear(4, 4), Centre(), nn.Linear(4, 4))
    layers = copy.deepcopy(plain)
    model = GPipe(layers, [2, 1], chunks=2, checkpoint="always")
    xs = torch.rand(3, 6, 4)
    sum(mean_of_squares(plain(x)) for x in xs).backward()
    sum(mean_of_squares(model(x)) for x in xs).backward()
    torch.testing.assert_close(*[[p.grad for p in x.parameters()] for x in (plain, layers)])


def test_what_is_given_has_the_order_of_the_micro_batches():
    plain = nn.Sequential(nn.Linear(4, 4), Contrast(), nn.Linear(4, 4))
    model = GPipe(copy.deepcopy(plain), [2, 1], chunks=2, checkpoint="always")
    schedule = parse("0F1 0F0 0B1 0B0\n1F1 1B1 1F0 1B0", [0, 1], 2)
    trained(plain, model, ScheduledLoss(model, mean_of_squares, schedule))


class Loss(Centre):
    """A loss with a centre."""

    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_loss_within_a_schedule(mode):
    plain, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Loss()
    layers, own = copy.deepcopy((plain, loss))
    training = ScheduledLoss(GPipe(layers, [1, 1], chunks=2, checkpoint=mode), own)
    for _ in range(3):
        x = torch.rand(6, 4)
        loss(plain(x)).backward()
        training(x).backward()
    torch.testing.assert_close(*[[p.grad for p in x.parameters()] for x in (plain, layers)])
    torch.testing.assert_close(own.centre, loss.centre)


class Before(OncePerMiniBatch):
    """A layer that counts its mini-batches, in front of them."""

    count = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def before_mini_batch(self):
        self.count += 1

    def forward(self, x):
        return self.linear(x).tanh()


class Checkpointed(nn.Module):
    """A layer within a checkpoint of PyTorch."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("kind", ["plain", "within", "around"])
def test_checkpoints_of_pytorch(kind):
    for layer in (Before(), Contrast()):
        layers = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4))
        if kind != "around":
            layers[1] = Checkpointed(layer)
        model = layers if kind == "plain" else GPipe(layers, [2, 1], chunks=2)
        if kind == "around":
            model = Checkpointed(model)
        output = model(torch.rand(6, 4)).sum()
        if isinstance(layer, Before):
            output.backward()
            assert layer.count == 1
        else:
            with pytest.raises(RuntimeError, match="layer: Contrast"):
                output.backward()
            assert layer.at == 6


# So says the compiler, which looks at them.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled(wrapped):
    plain = nn.Sequential(nn.Linear(4, 4), Contrast(), nn.Linear(4, 4))
    layers = model = copy.deepcopy(plain)
    if wrapped:
        layers[1].compile(backend="eager")
        model = GPipe(layers, [2, 1], chunks=2, checkpoint="always")
    else:
        model = torch.compile(model, backend="eager")
    trained(plain, layers, lambda x: mean_of_squares(model(x)))


def test_a_failed_step_updates_nothing():
    layer = Centre()
    model = GPipe(nn.Sequential(layer, nn.Linear(3, 3)), [1, 1], chunks=2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.rand(6, 4))
    assert not layer.centre.any()
    assert not _open


class Giving(OncePerMiniBatch):
    """A layer that gives values, one after another."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def forward(self, x):
        for value in self.values:
            self.give(value)
        return x


def test_wrong_uses():
    x = torch.rand(4, 4)
    for value in (3, torch.zeros(())):
        with pytest.raises(ValueError, match="tensors with rows"):
            Giving((x, value))(x)
    with pytest.raises(RuntimeError, match="micro-batches: 1, calls: 1, values: 2"):
        Giving(x, x)(x)
    with pytest.raises(RuntimeError, match="call the layer itself"):
        Centre().forward(x)
    layer = Centre()
    with pytest.raises(RuntimeError, match="layer: Centre, micro-batches: 2, calls: 4"):
        GPipe(nn.Sequential(layer, layer), [2], chunks=2)(x)
    model = GPipe(nn.Sequential(nn.Sequential(nn.Tanh())), [1], chunks=2)
    model[0].append(Centre())
    with pytest.raises(RuntimeError, match="wrap the model anew"):
        model(x)


def test_buffers_that_belong_to_the_mini_batch():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.zeros(()), persistent=False)
            self.register_buffer("table", torch.zeros(()))

        def forward(self, x):
            self.cache += 1
            return x + self.table

    class Own(nn.Linear):
        pass

    class Norm(nn.BatchNorm1d):
        pass

    layers = nn.Sequential(
        *(nn.BatchNorm1d(4), Norm(4), nn.Sequential(spectral_norm(Own(4, 4))), FakeQuantize()),
        *(parametrizations.spectral_norm(Own(4, 4)), Cached(), Average("replaced"), Codebook()),
    )
    before = state_of(layers)
    layers(torch.rand(6, 4))
    with pytest.warns(UserWarning, match="buffers: 6.average, 7.count, 7.total, micro-batches: 2"):
        warn_of_changes(before, layers, None, 2)


@pytest.mark.parametrize("wrapper", [GPipe, MappedGPipe])
def test_measuring_a_model_updates_nothing(wrapper):
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), Contrast()) for _ in range(2)])
    before = copy.deepcopy(layers.state_dict())
    model = wrapper(layers, "auto", sample=torch.rand(2, 4), devices=["cpu", "cpu"])
    torch.testing.assert_close(dict(model.module.state_dict()), dict(before))
