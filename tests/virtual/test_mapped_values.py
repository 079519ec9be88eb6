"""Models whose code does unusual things between mapped modules, on virtual accelerators."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.changing_buffers import Average
from tests.support.helpers import MODES, assert_no_races
from tests.virtual.stages import ONE_MODE
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.testing import observe


def linear():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


class Model(nn.Module):
    """Four blocks on as many devices; subclasses say what is between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (linear() for _ in range(4))


class Shift(nn.Module):
    """A layer that saves nothing for backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x):
        return x + self.weight


class ChangedAfterItLeft(Model):
    def __init__(self):
        super().__init__()
        self.b = Shift()

    def forward(self, x):
        y = self.a(x)
        z = self.b(y)
        y = y.clone()
        z = z + self.b(y)
        # The first device has sent it already.
        y.mul_(2)
        return self.d(z + self.b(y))


class WithoutGradFirst(Model):
    def forward(self, x):
        y = self.a(x)
        with torch.no_grad():
            target = self.b(y)
        return self.d((self.b(y) - target * 2).tanh())


class Uneven(Model):
    """Micro-batches that take different ways, by their values."""

    def forward(self, x):
        y = self.a(x)
        for _ in range(1 + int(x[0, 0] * 3)):
            y = self.b(y)
            if x[0, 1] > 0.5:
                y = self.c(y)
        return self.d(y)


class BackAndForth(Model):
    def forward(self, x):
        for _ in range(2):
            x = self.b(self.a(x)).to(x.device) + x.roll(1, 1)
        return self.d(self.c(x)).to(x.device) * x


class Norms(Model):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (
            nn.Sequential(linear(), nn.BatchNorm1d(6)) for _ in range(4)
        )

    def forward(self, x):
        # One norm twice: its statistics depend on the order.
        return self.d(self.a(self.c(self.b(self.a(x)))))


class Replaced(Model):
    """Visits of a device replace a buffer, and give one new memory."""

    def __init__(self):
        super().__init__()
        self.a = nn.ModuleList([linear(), Average("replaced", 6), Average("memory", 6)])

    def forward(self, x):
        first, both, later = self.a
        return later(both(self.b(both(first(x)))))


class SharedNorm(Model):
    """Two modules of a device have one norm, and are called in two visits."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(6)
        self.a = nn.ModuleList([nn.Sequential(linear(), norm) for _ in range(2)])

    def forward(self, x):
        return self.a[1](self.b(self.a[0](x)))


class Frozen(Model):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)
        self.b.requires_grad_(False)

    def forward(self, x):
        y = self.b(self.a(x))
        return self.d(self.c(y)) + y.to("cpu").to(self.d[0].weight.device)


KINDS = {
    kind.__name__: kind
    for kind in (
        *(ChangedAfterItLeft, WithoutGradFirst, Uneven, BackAndForth, Norms, Replaced, SharedNorm),
        Frozen,
    )
}


def wrapped(model, devices, mode="always", chunks=4):
    names = dict(zip("abcd", devices))
    return MappedGPipe(model, names, chunks=chunks, checkpoint=mode)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_buffers(devices, kind, mode):
    torch.manual_seed(0)
    plain = KINDS[kind]()
    pipe = wrapped(copy.deepcopy(plain), devices, mode)
    x = torch.rand(8, 6)
    losses = [plain(rows).square().mean() for rows in x.chunk(4)]
    torch.stack(losses).mean().backward()
    for seed in (None, 0, 1):
        pipe = wrapped(copy.deepcopy(pipe.module), devices, mode)
        fresh = KINDS[kind]().named_buffers(remove_duplicate=False)
        pipe.load_state_dict({**plain.state_dict(), **dict(fresh)})
        pipe.zero_grad()
        with observe(jitter=seed) as seen:
            pipe(x.to(devices[0])).square().mean().backward()
        assert_no_races(seen)
        for (name, own), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None), name
            if own.grad is not None:
                torch.testing.assert_close(own.grad.cpu(), other.grad)
        for own, other in zip(pipe.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own.cpu(), other)


class Dropping(Model):
    def forward(self, x):
        for layer in (self.a, self.b, self.c, self.d):
            x = nn.functional.dropout(layer(x), 0.5)
        return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]])
def test_dropout_is_equal_under_all_maps(devices, places, mode):
    def grads(places, mode):
        torch.manual_seed(0)
        pipe = wrapped(Dropping(), [devices[k] for k in places], mode)
        torch.manual_seed(1)
        pipe(torch.ones(8, 6, device=devices[0])).square().mean().backward()
        return [x.grad.cpu() for x in pipe.parameters()]

    for found, expected in zip(grads(places, mode), grads([0, 0, 0, 0], "never"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Chain(Model):
    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


@pytest.mark.parametrize("mode", ONE_MODE)
def test_memory_is_that_of_gpipe(devices, mode):
    wide = 256

    def peaks(pipe):
        found = []
        x = torch.rand(16, wide, device=devices[0])
        for _ in range(2):
            pipe.zero_grad()
            for device in devices[:4]:
                torch.accelerator.reset_peak_memory_stats(device)
            pipe(x).sum().backward()
            found = [torch.accelerator.max_memory_allocated(device) for device in devices[:4]]
        del pipe, x
        gc.collect()
        return found

    class Wide(Chain):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (
                nn.Sequential(*[nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(3)])
                for _ in range(4)
            )

    gc.collect()
    gpipe = GPipe(
        nn.Sequential(*Wide().children()), [1] * 4, devices=devices[:4], chunks=8, checkpoint=mode
    )
    expected = peaks(gpipe)
    del gpipe
    gc.collect()
    found = peaks(wrapped(Wide(), devices, mode, chunks=8))
    # How many gradients are on their way at a time depends on the host.
    gradients = 8 * 2 * wide * 4
    assert all(own <= other + gradients for own, other in zip(found, expected)), (found, expected)


class Attending(nn.Module):
    """Attention, which computes other operators where it gets one tensor for all three."""

    def __init__(self):
        super().__init__()
        self.first, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return checkpoint(self.attention, x, x, x, use_reentrant=False)[0]


def test_one_tensor_as_several_arguments(devices):
    """A checkpoint of PyTorch calls the module a second time outside of the step."""
    plain, x = Attending(), torch.rand(4, 3, 4)
    names = dict(zip(("first", "attention"), devices))
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=2, checkpoint="never")
    for model in (plain, pipe):
        model(x).sum().backward()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


class Returning(Model):
    """A value comes back to the first device, for a checkpoint of PyTorch on another one."""

    def forward(self, x):
        x = self.b(self.a(x)).to(x.device)
        return self.d(checkpoint(self.c, x, use_reentrant=False))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_memory_of_a_lane_that_a_checkpoint_of_pytorch_reads(devices):
    pipe = wrapped(Returning(), [devices[k] for k in (0, 1, 2, 0)], "never")
    for seed in (None, 0, 1):
        with observe(jitter=seed) as seen:
            pipe(torch.rand(8, 6, device=devices[0])).sum().backward()
        assert_no_races(seen)


class Changing(nn.Linear):
    def forward(self, x, held, pair):
        x.relu_()
        pair[0].sin_()
        return super().forward(x) + held[0] + pair[0]


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), Changing(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x.cos(), [x], (x * 2, 3))


def test_arguments_that_change_in_place_beside_a_list(devices):
    plain, x = Caller(), torch.rand(4, 4)
    names = {"first": devices[0], "second": devices[1]}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=2, checkpoint="never")
    plain(x).sum().backward()
    pipe(x.to(devices[0])).sum().backward()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)
