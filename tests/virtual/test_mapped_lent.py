"""One weight on several devices: one parameter, whose gradients come from all of them."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.changing_buffers import Average
from tests.support.helpers import assert_no_races
from tests.virtual.stages import ONE_MODE, Stage, limit, verify_steps
from tests.virtual.test_mapped import SEEDS, Chain
from torchgpipe import MappedGPipe, _torch
from torchgpipe.testing import observe


class Tied(Chain):
    """The last block has the weight of the first one."""

    def __init__(self, n):
        super().__init__(n)
        self.layers[-1].weight = self.layers[0].weight


class Hybrid(nn.Module):
    """A block of its own after one that others have, too."""

    def __init__(self, shared):
        super().__init__()
        self.shared, self.own = shared, Stage()

    def forward(self, x):
        return self.own(self.shared(x))


class Shared(nn.Module):
    """Every other block calls one block that all of them share."""

    def __init__(self, n):
        super().__init__()
        shared = Stage()
        self.layers = nn.ModuleList([Hybrid(shared) for _ in range(n)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Backwards(Tied):
    """The weight is at home on the last device."""

    def forward(self, x):
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Again(Chain):
    """One layer is called again and again, under one name after another."""

    def __init__(self, n):
        super().__init__(n)
        self.layers = nn.ModuleList([self.layers[0] for _ in range(n)])


KINDS = {"tied": Tied, "shared": Shared, "home after": Backwards, "again": Again}


def wrapped(plain, devices, n, m, mode, **options):
    order = reversed(range(n)) if isinstance(plain, Backwards) else range(n)
    names = {f"layers.{k}": device for k, device in zip(order, devices)}
    return MappedGPipe(copy.deepcopy(plain), names, chunks=m, checkpoint=mode, **options)


@pytest.mark.parametrize(
    ("kind", "cost"), [("tied", 1), ("shared", 2), ("home after", 1), ("again", 1)]
)
@pytest.mark.parametrize("mode", ONE_MODE)
def test_gradients_and_makespan(devices, kind, cost, mode):
    n, m = 4, 8
    torch.manual_seed(0)
    plain = KINDS[kind](n)
    x = torch.rand(m, 4)
    for row in x.split(1):
        plain(row).square().sum().backward()
    pipe = wrapped(plain, devices, n, m, mode)
    assert len([*pipe.parameters()]) == len([*plain.parameters()])
    verify_steps(pipe, plain, x, cost * limit(mode, n, m), SEEDS[:2])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_training(devices, kind, threads):
    torch.manual_seed(0)
    plain = KINDS[kind](3)
    pipe = wrapped(plain, devices, 3, 4, "except_last", threads=threads)
    own, other = (torch.optim.AdamW(x.parameters(), lr=0.1) for x in (pipe, plain))
    with observe() as seen:
        for _ in range(3):
            x = torch.rand(4, 4)
            plain(x).square().mean().backward()
            pipe(x.to(devices[0])).square().mean().backward()
            for optimizer in (own, other):
                optimizer.step()
                optimizer.zero_grad()
    assert_no_races(seen)
    state = {key: value.cpu() for key, value in pipe.state_dict().items()}
    assert [*state] == [*plain.state_dict()]
    torch.testing.assert_close(state, {**plain.state_dict()}, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pipe.module(x.to(devices[0])).cpu(), plain(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(pipe(x).cpu(), plain(x), rtol=1e-4, atol=1e-5)
    again = copy.deepcopy(pipe)
    assert again.module.layers[2] is not pipe.module.layers[2]
    again(x).sum().backward()
    assert len([*again.parameters()]) == len([*plain.parameters()])


def test_a_weight_that_is_frozen_or_used_without_grad_first(devices):
    class Target(Tied):
        def forward(self, x):
            with torch.no_grad():
                target = self.layers[-1](x)
            return super().forward(x) - target.to(self.layers[1].weight.device)

    plain = Target(2)
    pipe = wrapped(plain, devices, 2, 2, "never")
    x = torch.rand(2, 4)
    for row in x.split(1):
        plain(row).sum().backward()
    pipe(x.to(devices[0])).sum().backward()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


class Meeting(nn.Linear):
    """A layer that in backward waits in vain for another thread."""

    def __init__(self):
        super().__init__(4, 4)
        self.both = threading.Barrier(2)

    def forward(self, x):
        if _torch.graph_task() != -1:
            with pytest.raises(threading.BrokenBarrierError):
                self.both.wait(0.05)
            self.both.reset()
        return super().forward(x).sin()

    def __deepcopy__(self, memo):
        found = Meeting()
        found.load_state_dict(self.state_dict())
        return memo.setdefault(id(self), found)


class Checkpointed(nn.Module):
    """One layer, which the model's own code calls within checkpoints of PyTorch."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList([Meeting()] * 2)
        self.between = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        for layer, between in zip(self.layers, self.between):
            x = checkpoint(layer, between(x), use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_in_checkpoints_of_the_model(devices, reentrant):
    """Each recomputation is on the device of its call, and has the copies there to itself."""
    torch.manual_seed(0)
    plain, x = Checkpointed(reentrant), torch.rand(4, 4)
    names = {f"{name}.{k}": devices[k] for name in ("between", "layers") for k in range(2)}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=4, checkpoint="never")
    plain(x).sum().backward()
    with observe() as seen:
        pipe(x.to(devices[0])).sum().backward()
    assert_no_races(seen)
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


@pytest.mark.parametrize("shared", [nn.BatchNorm1d(4), Average("memory", 4)])
def test_a_buffer_that_a_module_elsewhere_would_change(devices, shared):

    class Normed(Hybrid):
        pass

    plain = Shared(0)
    plain.layers = nn.ModuleList([Normed(shared) for _ in range(2)])
    pipe = wrapped(plain, devices, 2, 2, "never")
    with pytest.raises(
        RuntimeError, match=r"must not be changed, or replaced.*map these modules to"
    ):
        pipe(torch.rand(4, 4))
    if isinstance(shared, nn.BatchNorm1d):
        pipe.eval()(torch.rand(4, 4))
