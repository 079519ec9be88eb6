"""Layers hand values on through an object that all of them are called with."""

import copy
from collections import UserDict, deque
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.virtual.stages import ONE_MODE, Stage, limit, verify_steps
from tests.virtual.test_mapped import SEEDS
from torchgpipe import MappedGPipe


class Keys(UserDict):
    """A mapping as Transformers has it for Gemma 3n: it can be moved, and is no dict."""

    def to(self, device):
        raise AssertionError("nobody moves it as a whole")


class Writing(Stage):
    """A block that writes what the blocks after it read."""

    def forward(self, x, shared):
        y = super().forward(x)
        shared["keys"] = y, y * 2
        shared.seen.append(id(shared))
        return y


class Reading(Stage):
    def forward(self, x, shared):
        keys, values = shared["keys"]
        assert keys.device == values.device == x.device
        shared.seen.append(id(shared))
        return super().forward(x + keys * values.sin())


class Sharing(nn.Module):
    """Two blocks write, and the others read what was written last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Writing(), Writing(), Reading(), Reading()])

    def forward(self, x):
        shared = Keys()
        shared.seen = []
        for layer in self.layers:
            x = layer(x, shared=shared)
        assert {*shared.seen} == {id(shared)}
        # What was written is where it was written.
        keys, _ = shared["keys"]
        assert keys.device == self.layers[1].weight.device
        return x


@pytest.mark.parametrize("mode", ONE_MODE)
def test_gradients_and_makespan(devices, mode):
    n, m = 4, 8
    torch.manual_seed(0)
    plain = Sharing()
    x = torch.rand(m, 4)
    for row in x.split(1):
        plain(row).square().sum().backward()
    names = {f"layers.{k}": devices[k] for k in range(n)}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=m, checkpoint=mode)
    verify_steps(pipe, plain, x, limit(mode, n, m), SEEDS[:2])


class Adding(nn.Module):
    """A block that changes what is in the mapping, and computes with what was there before."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x, seen):
        before = seen["all"]
        if self.kind == "list":
            x = self.layer(x).tanh() * before[-1]
            before.append(x)
        else:
            x = (self.layer(x) + before).tanh()
            seen["all"] += x
        return x


class Together(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.blocks = nn.ModuleList([Adding(kind) for _ in range(3)])

    def forward(self, x):
        first = [x] if self.blocks[0].kind == "list" else torch.zeros_like(x)
        seen = UserDict(all=first)
        for block in self.blocks:
            x = block(x, seen)
        return x if isinstance(first, Tensor) else x + len(first)


@pytest.mark.parametrize("kind", ["list", "tensor"])
def test_what_blocks_change_is_there_for_later_ones(kind, devices, mode):
    plain = Together(kind)
    names = {f"blocks.{k}": devices[k] for k in range(3)}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=2, checkpoint=mode)
    x = torch.rand(4, 4)
    found, expected = pipe(x), plain(x)
    torch.testing.assert_close(found.cpu(), expected)
    if kind == "tensor" and mode != "never":
        with pytest.raises(RuntimeError, match="what a mapping held"):
            found.sum().backward()
        return
    for output in (found, expected):
        output.square().sum().backward()
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


class Store:
    """A plain object with a list of others, as a cache of layers is."""

    def __init__(self):
        self.layers = [SimpleNamespace(), SimpleNamespace()]


def turned(shared):
    """Take the last value, and put another one in its place."""
    x = shared.pop()
    shared.append(x.sin())
    return x


#: Objects, how a value is put into them, and how it is found there.
OBJECTS = {
    "namespace": (
        SimpleNamespace,
        lambda shared, x: setattr(shared, "x", x),
        lambda shared: shared.x,
    ),
    "list of an object": (
        lambda: SimpleNamespace(all=[]),
        lambda shared, x: shared.all.append(x),
        lambda shared: shared.all[-1],
    ),
    "objects of an object": (
        Store,
        lambda shared, x: setattr(shared.layers[1], "x", x),
        lambda shared: shared.layers[1].x,
    ),
    "mapping of a mapping": (
        lambda: UserDict(inner=UserDict()),
        lambda shared, x: shared["inner"].update(x=x),
        lambda shared: shared["inner"]["x"],
    ),
    "mapping of a dict": (
        lambda: {"inner": UserDict()},
        lambda shared, x: shared["inner"].update(x=x),
        lambda shared: shared["inner"]["x"],
    ),
    "list": (list, lambda shared, x: shared.append(x), turned),
    "deque": (deque, lambda shared, x: shared.append(x), turned),
    "list of a dict": (
        lambda: {"all": []},
        lambda shared, x: shared["all"].append(x),
        lambda shared: turned(shared["all"]),
    ),
}


class Handing(nn.Module):
    """A layer that puts a value into an object, or finds one there."""

    def __init__(self, kind, first):
        super().__init__()
        _, self.put, self.find = OBJECTS[kind]
        self.layer, self.first = nn.Linear(4, 4), first

    def forward(self, x, shared):
        if self.first:
            self.put(shared, (2 * x).tanh())
            return self.layer(x).tanh()
        return self.layer(x + self.find(shared)).tanh()


class Handed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList([Handing(kind, k == 0) for k in range(3)])

    def forward(self, x):
        shared = OBJECTS[self.kind][0]()
        for layer in self.layers:
            x = layer(x, shared)
        return x + OBJECTS[self.kind][2](shared)


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("mode", ONE_MODE)
def test_objects_of_other_kinds(kind, devices, mode):
    plain = Handed(kind)
    x = torch.rand(4, 4)
    for rows in x.chunk(2):
        plain(rows).square().sum().backward()
    names = {f"layers.{k}": devices[k] for k in range(3)}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=2, checkpoint=mode)
    verify_steps(pipe, plain, x, 0, SEEDS[:1])


class Holding(nn.Linear):
    """A layer that holds what it shares with others, and is not called with it."""

    def __init__(self, shared):
        super().__init__(4, 4)
        self.shared = shared

    def forward(self, x):
        if "x" in self.shared:
            x = x + self.shared["x"]
        self.shared["x"] = x
        return super().forward(x)


def test_what_layers_hold_on_several_devices(devices, mode):
    model = nn.Sequential(*[Holding(shared) for shared in [{}] for _ in range(2)])
    pipe = MappedGPipe(model, {"0": devices[0], "1": devices[1]}, chunks=2, checkpoint=mode)
    message = r"must not hand .*\(module: 1 on virtual:1, found: shared on virtual:0\)"
    with pytest.raises(RuntimeError, match=message):
        pipe(torch.rand(4, 4))
