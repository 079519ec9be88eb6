"""Code between mapped modules changes the state of the model, micro-batch by micro-batch."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races
from tests.support.size import some
from tests.virtual.stages import ONE_MODE, limit
from tests.virtual.test_mapped import Chain, makespans
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

# Weights are used on the streams of two visits.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


class Model(nn.Module):
    """Three layers, with buffers that the root changes in its own way."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(4, 16))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def layered(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class After(Model):
    """The mean is read in front, and changed after."""

    def forward(self, x):
        x = self.layered(x - self.mean)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x


class OfSeveralDevices(Model):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x


class InFront(Model):
    """The mean is changed in front, and read after."""

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.layered(x) - self.mean


class ReadLater(Model):
    """The mean is changed in front, and read when the model has come back."""

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return self.layers[0](self.layered(x)) - self.mean


class Passed(Model):
    """The mean is an argument of a module."""

    def forward(self, x):
        x = self.layered(x)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        with torch.no_grad():
            centre = self.layers[1](self.mean[None])
        return x + centre


class Queue(Model):
    """A queue of keys, as MoCo has one."""

    def forward(self, x):
        x = self.layered(x)
        logits = x @ self.queue.clone()
        place = int(self.place)
        self.queue[:, place : place + 2] = x.detach().T
        self.place[0] = (place + 2) % 16
        return logits


class Views(Model):
    def forward(self, x):
        x = self.layered(x - self.mean)
        self.mean[:2] += x.detach().mean(0)[:2]
        self.mean.view(2, 2)[1].copy_(x.detach().mean(0)[2:])
        return x


class Replaced(Model):
    """Another buffer comes in the place of the first one."""

    def forward(self, x):
        x = self.layered(x - self.mean)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x


class OfAModule(Model):
    """The mean belongs to a mapped module, which reads it."""

    class Centred(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            return super().forward(x - self.mean)

    def __init__(self):
        super().__init__()
        self.layers[0] = self.Centred()

    def forward(self, x):
        x = self.layered(x)
        self.layers[0].mean.lerp_(x.detach().mean(0), 0.5)
        return x


KINDS = [After, OfSeveralDevices, InFront, ReadLater, Passed, Queue, Views, Replaced, OfAModule]
KINDS = {kind.__name__: kind for kind in KINDS}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_one_micro_batch_after_another(devices, kind, threads, mode):
    plain = KINDS[kind]()
    names = {"": devices[0], "layers.1": devices[1], "layers.2": devices[2]}
    options = {"chunks": 4, "checkpoint": mode, "threads": threads}
    pipe = MappedGPipe(copy.deepcopy(plain), names, **options)
    x = torch.rand(8, 4)
    expected = []
    for _ in range(2):
        expected += [plain(rows) for rows in x.chunk(4)]
    torch.cat(expected).square().sum().backward()
    for seed in (None, *range(some(5, 1))):
        again = copy.deepcopy(pipe)
        with observe(jitter=seed) as seen:
            # The second step may be that of several threads.
            found = [again(x.to(devices[0])) for _ in range(2)]
            torch.cat(found).square().sum().backward()
        assert_no_races(seen)
        torch.testing.assert_close(torch.cat(found).cpu(), torch.cat(expected))
        for own, other in zip(again.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own.cpu(), other)
        for own, other in zip(again.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.cpu(), other.grad)


class Counting(Chain):
    """The mean is read where it is changed, after all layers."""

    def __init__(self, n):
        super().__init__(n)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = super().forward(x)
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return x + self.mean


@pytest.mark.parametrize("mode", ONE_MODE)
def test_changes_that_nothing_in_front_reads_hold_nobody_up(devices, mode):
    names = {"": devices[0], **{f"layers.{k}": devices[k] for k in range(4)}}
    pipe = MappedGPipe(Counting(4), names, chunks=8, checkpoint=mode)
    found = makespans(pipe, torch.rand(8, 4, device=devices[0]))
    assert found == [limit(mode, 4, 8)] * len(found)


class Later(After):
    """Only in later steps the mean changes."""

    def forward(self, x):
        if self.place:
            return super().forward(x)
        return self.layered(x)


def test_changes_that_begin_when_several_threads_compute(devices):
    names = {"": devices[0], "layers.1": devices[1], "layers.2": devices[2]}
    pipe = MappedGPipe(Later(), names, chunks=4, threads=3)
    x = torch.rand(8, 4, device=devices[0])
    pipe(x)
    pipe.module.place.fill_(1)
    with pytest.raises(RuntimeError, match=r"must not change .* \(function: lerp_\)"):
        pipe(x)
