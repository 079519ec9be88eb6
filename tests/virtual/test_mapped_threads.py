"""Models that make the host wait for a device, computed by several threads."""

import copy
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch import nn

from tests.behaviour.test_mapped_architectures import NAMES, compare
from tests.support.helpers import MODES, assert_no_races
from tests.support.size import some
from tests.virtual.stages import ONE_MODE, Stage, limit, own_streams
from torchgpipe import MappedGPipe
from torchgpipe.ambient.generators import get_state
from torchgpipe.testing import observe

SEEDS = range(some(20, 1))

# Weights of layers that are called again are used on the streams of two visits.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


class Waiting(Stage):
    """A stage whose code depends on what a device has computed."""

    def forward(self, x):
        x = super().forward(x)
        return x * 2 if x.sum().item() > 1e6 else x


class Chain(nn.Module):
    """Stages one after another, some of which are called again."""

    def __init__(self, n, layer=Waiting, rounds=1):
        super().__init__()
        self.rounds = rounds
        self.layers = nn.ModuleList([layer() for _ in range(n)])

    def forward(self, x):
        for _ in range(self.rounds):
            for layer in self.layers:
                x = layer(x)
        return x


def mapped(model, devices, mode="never", m=8, threads=4):
    """The model, a list of layers of which is spread, after the first step."""
    names = {f"layers.{k}": device for k, device in enumerate(devices)}
    pipe = MappedGPipe(model, names, chunks=m, checkpoint=mode, threads=threads)
    pipe(torch.rand(m, 4, device=devices[0]))
    return pipe


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("threads", [4, 5])
def test_makespan(devices, mode, threads):
    n, m = 4, 8
    pipe = mapped(Chain(n), devices[:n], mode, m, threads)
    x = torch.rand(m, 4, device=devices[0])
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            y = pipe(x)
        assert_no_races(seen)
        assert seen.makespan == n + m - 1
        with observe(jitter=seed) as seen:
            y.sum().backward()
        assert_no_races(seen)
        assert seen.makespan == limit(mode, n, m) - (n + m - 1)


def test_one_thread_takes_the_time_of_one_device(devices):
    pipe = mapped(Chain(4), devices[:4], threads=1)
    with observe() as seen:
        pipe(torch.rand(8, 4, device=devices[0]))
    assert seen.makespan == 4 * 8


def steps(pipe, x):
    """The outputs and the gradients of two steps."""
    found = []
    for _ in range(2):
        pipe.zero_grad()
        y = pipe(x)
        y.square().mean().backward()
        found += [y.detach().cpu(), *(p.grad.cpu() for p in pipe.parameters())]
    return found


class Sleepy(nn.Module):
    """A layer with dropout, for which the host takes a while."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        time.sleep(0.0005)
        return nn.functional.dropout(x, training=self.training)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("mode", ONE_MODE)
def test_the_numbers_are_those_of_one_thread(devices, mode, rounds):
    """Random numbers, and with them outputs and gradients, do not depend on the threads."""
    plain = Chain(3, Sleepy, rounds)
    x = torch.rand(6, 4, device=devices[0])
    found = []
    for threads in (1, 3):
        torch.manual_seed(0)
        pipe = mapped(copy.deepcopy(plain), devices[:3], mode, 6, threads)
        with observe() as seen:
            found.append(steps(pipe, x))
        assert_no_races(seen)
    for own, other in zip(*found, strict=True):
        # Two visits of a device add their gradients up as they come.
        torch.testing.assert_close(own, other, rtol=1e-5 * (rounds > 1), atol=1e-7 * (rounds > 1))


@pytest.mark.parametrize("name", some(NAMES, ["gemma2"]))
def test_architectures(devices, name):
    for seed in (None, *SEEDS)[: some(21, 1)]:
        with observe(jitter=seed) as seen:
            compare(name, devices[:3], "except_last", chunks=4, threads=3)
        assert_no_races(seen)


class Where(nn.Module):
    """Notes the thread of each call."""

    threads: ClassVar[list[int]] = []

    def forward(self, x):
        self.threads.append(threading.get_ident())
        return x


class Failing(Where):
    fails = None

    def forward(self, x):
        if self.fails is not None and x[0, 0].item() == self.fails:
            raise ValueError("no")
        return x


def test_a_failure_ends_all_threads(devices):
    """The error is that of the micro-batch that fails, and the next step is as ever."""
    pipe = mapped(Chain(3, Failing), devices[:3], m=6, threads=3)
    x = torch.arange(6.0).unsqueeze(1).expand(6, 4).to(devices[0])
    for _ in range(20):
        Failing.fails = 2
        try:
            with pytest.raises(BaseException, match="no") as caught:
                pipe(x)
            assert type(caught.value) is ValueError
        finally:
            Failing.fails = None
    assert caught.value.__notes__ == [f"raised in layers.0 on {devices[0]}, micro-batch 2"]
    assert torch.equal(pipe(x).cpu(), x.cpu())


def test_the_first_step_is_the_caller_s(devices):
    names = {f"layers.{k}": device for k, device in enumerate(devices[:2])}
    pipe = MappedGPipe(Chain(2, Where), names, chunks=4, threads=2)
    x = torch.rand(4, 4, device=devices[0])
    for training in (True, False):
        pipe.train(training)
        for expected in (1, 2):
            Where.threads.clear()
            pipe(x)
            assert len({*Where.threads}) == expected
            assert (threading.get_ident() in Where.threads) == (expected == 1)


class Keeping(nn.Module):
    def forward(self, x):
        self.kept = x
        return x


def test_attributes(devices):
    pipe = mapped(Chain(2, Keeping), devices[:2], m=4, threads=2)
    with pytest.raises(RuntimeError, match=r"set attributes.*layers.0.*'kept'.*threads=1"):
        pipe(torch.rand(4, 4, device=devices[0]))
    pipe.threads = 1
    pipe(torch.rand(4, 4, device=devices[0]))


class Drawing(Where):
    def forward(self, x):
        torch.rand(())
        return super().forward(x)


class Noise(Chain):
    """A model that draws on the first device when it is at the last one."""

    def forward(self, x):
        y = super().forward(x)
        return y + torch.rand(4, device=x.device).to(y.device)


class Counting(Where):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x)


MODELS = {
    "numbers of the CPU": lambda: Chain(2, Drawing),
    "numbers of a device after": lambda: Noise(2, Where),
    "buffers that two visits change": lambda: Chain(2, Counting, 2),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_whose_results_would_depend_on_the_threads(devices, model):
    """One thread computes them."""
    pipe = mapped(MODELS[model](), devices[:2], m=4, threads=2)
    Where.threads.clear()
    pipe(torch.rand(4, 4, device=devices[0]))
    assert {*Where.threads} == {threading.get_ident()}


def test_a_device_that_is_the_cpu(devices):
    pipe = mapped(Chain(2, Where), [devices[0], torch.device("cpu")], m=4, threads=2)
    Where.threads.clear()
    pipe(torch.rand(4, 4))
    assert {*Where.threads} == {threading.get_ident()}


def test_modes_that_only_the_caller_computes_in(devices):
    pipe = mapped(Chain(2, Where), devices[:2], m=4, threads=2)
    Where.threads.clear()
    with torch.autograd.graph.save_on_cpu():
        pipe(torch.rand(4, 4, device=devices[0]))
    assert {*Where.threads} == {threading.get_ident()}


class Uneven(Chain):
    """Micro-batches that take different ways, by their values."""

    def forward(self, x):
        for _ in range(1 + int(x[0, 0].item() * 3)):
            for layer in self.layers:
                if x[0, 1].item() > 0.3:
                    x = layer(x)
        return self.layers[0](x)


def test_ways_that_differ(devices):
    plain = Uneven(3, Sleepy).eval()
    x = torch.rand(8, 4)
    x[:, 0] = x[:, 0].clamp(0, 0.99)
    expected = torch.cat([plain(row) for row in x.split(1)])
    pipe = mapped(copy.deepcopy(plain), devices[:3], "never", 8, 4)
    for seed in (None, *SEEDS):
        with observe(jitter=seed) as seen:
            y = pipe(x.to(devices[0]))
            y.sum().backward()
        assert_no_races(seen)
        torch.testing.assert_close(y.cpu(), expected)


class Overtaken(Chain):
    """A model whose first micro-batch ends when the third one has come to the first device."""

    third = threading.Event()

    def forward(self, x):
        k = int(x[0, 0].item())
        x = self.layers[0](x)
        if k == 2:
            self.third.set()
            return x
        x = self.layers[0](self.layers[1](x))
        if k == 0:
            x = self.layers[2](x)
            assert self.third.wait(30)
        return x


def test_micro_batches_that_end_leave_the_numbers_of_others(devices):
    """Nobody draws, so the caller's generators stay as they are."""
    Overtaken.third.set()
    pipe = mapped(Overtaken(3, Where), devices[:3], m=3, threads=3)
    Overtaken.third.clear()
    x = torch.arange(3.0).unsqueeze(1).expand(3, 4).to(devices[0])
    before = [get_state(device) for device in devices[:3]]
    assert torch.equal(pipe(x).cpu(), x.cpu())
    assert all(map(torch.equal, before, map(get_state, devices[:3])))


def test_streams_of_the_caller(devices):
    """In a thread, too, code in front of the modules uses the streams of the caller."""
    pipe = mapped(Chain(2), devices[:2], m=4, threads=2)
    found = []
    pipe.module.register_forward_pre_hook(
        lambda *_: found.append(torch.accelerator.current_stream(devices[0]))
    )
    x = torch.rand(4, 4, device=devices[0])
    with own_streams(devices[:2]):
        own = torch.accelerator.current_stream(devices[0])
        pipe(x)
    assert found == [own] * 4
