"""A device map divides lists, and keeps other code whole as long as devices get even shares."""

import pytest
import torch
from torch import nn

from torchgpipe.balance import map_by_size
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.planner.maps import Units


class Block(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers or [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])

    def forward(self, x):
        return x + self.layers(x)


class Model(nn.Module):
    """A model that calls what is in its parts, one after another, be they lists or not."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        def run(module, x):
            if isinstance(module, nn.ModuleList):
                for inner in module:
                    x = run(inner, x)
                return x
            return module(x)

        for part in self.children():
            x = run(part, x)
        return x


def linear():
    return nn.Linear(4, 4)


def names(model, **options):
    return [*Wholes.of(model, **options).blocks()]


def test_sequences_and_lists_within_lists():
    pair = nn.ModuleList([linear(), linear()])
    model = Model(body=nn.Sequential(Block(), Block()), levels=nn.ModuleList([pair, Block()]))
    assert names(model) == ["body.0", "body.1", "levels.0.0", "levels.0.1", "levels.1"]


def test_activations_of_a_list_are_blocks_unless_they_have_two_names():
    act = nn.ReLU()
    model = Model(act=act, body=nn.Sequential(linear(), act, linear(), nn.Tanh()))
    assert names(model) == ["body.0", "body.2", "body.3"]
    blocks = Wholes.of(model).blocks()
    units = Units(blocks, dict.fromkeys(blocks, 1.0))
    assert [*units.members.values()] == [["body.0"], ["body.2", "body.3"]]
    first = Units({"a": nn.ReLU(), "b": linear()}, {"a": 1.0, "b": 1.0})
    assert [*first.members.values()] == [["a", "b"]]


def test_a_module_with_two_names_is_a_block_under_each():
    block = Block()
    assert names(Model(a=block, b=nn.ModuleList([block, linear()]))) == ["a", "b.0", "b.1"]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([4.0, 1.0, 4.0], None),
        # A list is divided from half of a device's share on, and code only if it holds up all.
        ([4.0, 3.0, 4.0], ["a", "b.0.0", "b.0.1", "b.1"]),
        ([1.0, 1.0, 5.0], ["a", "b.0", "b.1.layers.0", "b.1.layers.1", "b.1.layers.2"]),
    ],
)
def test_large_blocks(costs, expected):
    model = Model(a=linear(), b=nn.ModuleList([nn.Sequential(linear(), linear()), Block()]))
    wholes = Wholes.of(model)
    blocks = wholes.blocks()
    assert [*blocks] == ["a", "b.0", "b.1"]
    found = wholes.finer(blocks, dict(zip(blocks, costs)), 2)
    assert (found and [*found]) == expected


def test_classes_that_are_kept_whole():
    model = Model(body=nn.Sequential(Block(), linear()))
    whole = Wholes.of(model, ["Sequential"])
    assert [*whole.blocks()] == ["body"]
    assert whole.finer(whole.blocks(), {"body": 1.0}, 2) is None


def test_a_sequence_is_spread():
    model = Model(stem=linear(), body=nn.Sequential(*[Block() for _ in range(4)]), head=linear())
    found = map_by_size(["a", "b"], model, torch.rand(2, 4))
    assert [found[f"body.{k}"] for k in range(4)] == ["a", "a", "b", "b"]
