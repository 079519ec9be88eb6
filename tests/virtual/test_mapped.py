"""Models under a device map take the time of GPipe on virtual accelerators, without a race."""

import copy
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.simulate.critical import step_path
from tests.behaviour.test_mapped_architectures import NAMES, compare
from tests.support.helpers import MODES, assert_no_races
from tests.support.size import some
from tests.virtual.stages import ONE_MODE, Lagging, Stage, limit, own_streams
from torchgpipe import MappedGPipe
from torchgpipe.devices.pool import StreamPool
from torchgpipe.testing import observe

SEEDS = range(some(20, 1))


class Chain(nn.Module):
    """Stages one after another, called one by one."""

    def __init__(self, n, width=4):
        super().__init__()
        self.layers = nn.ModuleList([Stage(features=width) for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def mapped(model, devices, mode, m, name="layers"):
    names = {f"{name}.{k}": device for k, device in enumerate(devices)}
    return MappedGPipe(model, names, chunks=m, checkpoint=mode)


def makespans(pipe, x, seeds=(None, *SEEDS), own=False):
    found = []
    with own_streams(dict.fromkeys(pipe.device_map.values()), own):
        for seed in seeds:
            with observe(jitter=seed) as seen:
                pipe(x).sum().backward()
            assert_no_races(seen)
            found.append(seen.makespan)
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m"), some([(4, 8), (8, 32)], [(4, 8)]))
def test_makespan(devices, n, m, mode):
    pipe = mapped(Chain(n), devices[:n], mode, m)
    found = makespans(pipe, torch.rand(m, 4, device=devices[0]))
    assert found == [limit(mode, n, m)] * len(found)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_several_modules_on_a_device_are_one_cell(devices, mode):
    n, m = 4, 8
    places = [devices[k // 2] for k in range(2 * n)]
    pipe = mapped(Chain(2 * n), places, mode, m)
    found = makespans(pipe, torch.rand(m, 4, device=devices[0]))
    assert found == [2 * limit(mode, n, m)] * len(found)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_other_streams_of_the_caller(devices, mode):
    pipe = mapped(Chain(4), devices[:4], mode, 8)
    found = makespans(pipe, torch.rand(8, 4, device=devices[0]), own=True)
    assert found == [limit(mode, 4, 8)] * len(found)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_slow_copies(devices, mode):
    n, m, copy_time = 3, 6, 0.75
    pipe = mapped(Chain(n), devices[:n], mode, m)
    # A micro-batch of one row has four numbers of four bytes.
    links = {(a, b): 16 / copy_time for a in range(n) for b in range(n) if abs(a - b) == 1}
    expected = step_path(mode, m, [1] * n, [1] * n, [2] * n, [copy_time] * (n - 1))
    for seed in (None, *SEEDS):
        with observe(jitter=seed, bandwidth=links) as seen:
            pipe(torch.rand(m, 4, device=devices[0])).sum().backward()
        assert_no_races(seen)
        assert seen.makespan == expected


@pytest.mark.parametrize("mode", ONE_MODE)
@pytest.mark.parametrize("j", [0, 1])
def test_a_host_that_is_slow_takes_no_time(devices, mode, j):
    """The next device gets ahead of a slow one by as many micro-batches as copy streams."""
    model = Chain(3)
    model.layers[j] = Lagging()
    with patch.object(StreamPool, "COPIES", 4):
        pipe = mapped(model, devices[:3], mode, 16)
        found = makespans(pipe, torch.rand(16, 4, device=devices[0]), seeds=(None, 0))
    assert found == [limit(mode, 3, 16)] * 2


class EncoderDecoder(nn.Module):
    """An encoder whose output goes to each layer of a decoder on the same devices."""

    class Layer(Stage):
        def forward(self, x, encoded):
            return super().forward(x + encoded)

    def __init__(self, n):
        super().__init__()
        self.encoder = nn.ModuleList([Stage() for _ in range(n)])
        self.decoder = nn.ModuleList([self.Layer() for _ in range(n)])

    def forward(self, x):
        encoded = x
        for layer in self.encoder:
            encoded = layer(encoded)
        for layer in self.decoder:
            x = layer(x, encoded)
        return x


@pytest.mark.parametrize("mode", ONE_MODE)
def test_a_model_that_comes_back_to_its_devices(devices, mode):
    n, m = 4, 8
    plain = EncoderDecoder(n)
    model = copy.deepcopy(plain)
    names = {f"{part}.{k}": devices[k] for part in ("encoder", "decoder") for k in range(n)}
    pipe = MappedGPipe(model, names, chunks=m, checkpoint=mode)
    x = torch.rand(m, 4)
    found = makespans(pipe, x.to(devices[0]))
    # As eight stages, of which two on each device compute side by side.
    assert found == [limit(mode, 2 * n, m)] * len(found)
    pipe.zero_grad()
    pipe(x.to(devices[0])).sum().backward()
    plain(x).sum().backward()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


class Supervised(Chain):
    """A model that moves a mask to each layer, and labels to its output, as many models do."""

    def forward(self, x, labels):
        mask = (labels > -1).float().unsqueeze(1)
        for layer in self.layers:
            x = layer(x) * mask.to(layer.weight.device)
        return (x.sum(1) - labels.to(x.device)).square()


@pytest.mark.parametrize("mode", ONE_MODE)
def test_copies_of_the_model_itself_hold_nobody_up(devices, mode):
    pipe = mapped(Supervised(4), devices[:4], mode, 8)
    x, labels = torch.rand(8, 4, device=devices[0]), torch.rand(8, device=devices[0])
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            pipe(x, labels).sum().backward()
        assert_no_races(seen)
        assert seen.makespan == limit(mode, 4, 8)


# Embedding and head of some models are one weight, used on the streams of two visits.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_architectures(devices, name, mode):
    for seed in (None, *SEEDS)[: some(21, 1)]:
        with observe(jitter=seed) as seen:
            compare(name, devices[:3], mode)
        assert_no_races(seen)
