"""Device maps that are proposed keep blocks whole, and spread what they cost."""

import math
import time
from random import Random

import pytest
import torch
from torch import nn

from torchgpipe.balance import map_by_size, map_by_time
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.planner.blocks import hooked
from torchgpipe.planner.maps import Units


class Block(nn.Module):
    def __init__(self, seconds=0.0, width=4):
        super().__init__()
        self.seconds, self.layer = seconds, nn.Linear(4, width)
        self.back = nn.Linear(width, 4)

    def forward(self, x):
        time.sleep(self.seconds)
        return self.back(self.layer(x).tanh())


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return torch.rand(1) * self.norm(x)


def test_blocks():
    assert [*Wholes.of(Model(Block(), Block())).blocks()] == [
        "embed",
        "blocks.0",
        "blocks.1",
        "norm",
    ]
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Block()))
    assert [*Wholes.of(nested).blocks()] == ["0", "1"]
    assert [*Wholes.of(nested, no_split=["Block"]).blocks()] == ["0", "1.0", "1.1"]
    assert [*Wholes.of(nn.Linear(2, 2)).blocks()] == [""]


class Watch:
    """A stopwatch that a busy neighbour slows down in half of the rounds, by up to three times."""

    random = Random(0)

    def __init__(self, device):
        self.seconds = 1.0

    def start(self):
        pass

    def stop(self):
        return self.seconds * self.random.choice([1.0, self.random.uniform(1, 3)])


def test_alike_blocks_get_equal_shares(monkeypatch):
    monkeypatch.setattr("torchgpipe.planner.blocks.Stopwatch", Watch)
    monkeypatch.setattr("torchgpipe.planner.sandbox.LEAST", 10)
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)])
    for _ in range(20):
        found = map_by_time([0, 1, 2, 3], model, torch.rand(1, 2), timeout=0)
        assert found == {"": 0, **{str(k): k // 2 for k in range(8)}}


def test_two_names_of_a_block_that_is_called_once(monkeypatch):
    """Each round begins with the first name, which has all of the time."""
    monkeypatch.setattr("torchgpipe.planner.blocks.Stopwatch", Watch)
    monkeypatch.setattr(Watch, "random", Random(0))

    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
            self.extra = nn.ModuleList([self.layers[0]])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    found = map_by_time([0, 1], Aliased(), torch.rand(1, 2), timeout=0)
    assert [found[f"layers.{k}"] for k in range(4)] == [0, 0, 1, 1]
    assert found["extra.0"] == 0


def test_by_size():
    model = Model(Block(width=400), Block(), Block(), Block(width=400))
    found = map_by_size(["a", "b"], model, torch.rand(3, 4))
    assert (found["blocks.0"], found["blocks.3"]) == ("a", "b")
    # What is kept for backward counts, too.
    model = Model(Block(width=400), Block(), Block())
    found = map_by_size(["a", "b"], model, torch.rand(1000, 4), param_scale=0)
    assert (found["embed"], found["blocks.0"], found["blocks.1"]) == ("a", "a", "b")


@pytest.mark.parametrize("propose", [map_by_time, map_by_size])
def test_buffers_that_a_forward_replaces_or_cannot_change(propose):
    class Counting(Model):
        def __init__(self):
            super().__init__(Block(), Block())
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("table", torch.ones(1).expand(3))

        def forward(self, x):
            self.count = self.count + 1
            return super().forward(x) * self.table[0]

    model = Counting()
    count = model.count
    propose(["a"], model, torch.ones(3, 4), **({"timeout": 0} if propose is map_by_time else {}))
    assert model.count is count
    assert count == 0


def proposed(devices, blocks, costs):
    units = Units(blocks, costs)
    return units.placed(devices, units.cut([math.inf] * len(devices))[0])


def test_tied_blocks_may_be_apart():
    blocks = {name: nn.Linear(2, 2) for name in "abcd"}
    blocks["d"].weight = blocks["a"].weight
    found = proposed([0, 1], blocks, dict.fromkeys("abcd", 1.0))
    assert found == {"": 0, "a": 0, "b": 0, "c": 1, "d": 1}


def test_a_block_that_is_called_under_several_names():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.Linear(4, 4)
            self.layers = nn.ModuleList([layer, nn.Linear(4, 4), layer, layer])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, seen = Again(), []

    def before(name, *_):
        seen.append(name)

    with hooked(Wholes.of(model).blocks(), before, lambda *_: None):
        model(torch.rand(2, 4))
    assert seen == [f"layers.{k}" for k in range(4)]
    device_map = map_by_size([0, 1], model, torch.rand(2, 4))
    assert [*device_map.values()] == [0, 0, 0, 1, 1]


def test_blocks_that_share_a_norm_stay_together():
    blocks = {name: nn.Sequential(nn.Linear(2, 2)) for name in "abcd"}
    blocks["a"].append(nn.BatchNorm1d(2))
    blocks["d"].append(blocks["a"][1])
    found = proposed([0, 1], blocks, dict.fromkeys("abcd", 1.0))
    assert found == {"": 0, "a": 0, "b": 1, "c": 1, "d": 0}


def test_uncalled_block_goes_with_the_block_before():
    """A weight may be used without a call, as a table of positions is."""
    blocks = {name: nn.Linear(2, 2) for name in "abcde"}
    costs = {"a": 1.0, "c": 1.0, "d": 2.0}
    assert proposed([0, 1], blocks, costs) == {"": 0, "a": 0, "b": 0, "c": 0, "d": 1, "e": 1}
    blocks["b"].weight = blocks["d"].weight
    assert proposed([0, 1], blocks, costs) == {"": 0, "a": 0, "b": 1, "c": 0, "d": 1, "e": 1}


def test_uncalled_block_before_all_others_is_on_the_first_device():
    blocks = {name: nn.Linear(2, 2) for name in "abc"}
    found = proposed([0, 1], blocks, {"c": 1.0, "b": 1.0})
    assert found == {"": 0, "c": 0, "b": 1, "a": 0}


def test_blocks_whose_weights_are_used_without_any_call():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = nn.functional.linear(x, layer.weight)
            return x

    found = map_by_size([0], Functional(), torch.rand(3, 4))
    assert found == {"": 0, "layers.0": 0, "layers.1": 0}


def test_fewer_blocks_than_devices():
    with pytest.raises(ValueError, match=r"blocks: 3, devices: 4"):
        map_by_size([0, 1, 2, 3], Model(Block()), torch.rand(3, 4))
