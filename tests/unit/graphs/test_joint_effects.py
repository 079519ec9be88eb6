"""Effects: which memory a node has, reads and writes."""

import torch
from torch import nn

from tests.support.graphs import traced
from torchgpipe.graphs.joint import Effects, fakes_of, is_random, is_view, is_void


def nodes_of(function, x, layers=None):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            return function(x) if layers is None else function(self.layers, x)

    joint = traced(Layer(), x, recorded=False).joint
    return joint, {x.name: x for x in joint.module.graph.nodes}


def test_changes_in_place():
    def change(x):
        y = x * 2
        view = y.view(-1)
        view.add_(1)
        return y.sin()

    joint, nodes = nodes_of(change, torch.rand(2, 3))
    effects = Effects(joint.module.graph.nodes)
    assert effects.memory[nodes["mul"]] == effects.memory[nodes["view"]]
    assert effects.before(nodes["sin"]) == [nodes["add_"]]
    assert effects.before(nodes["view"]) == []
    region = set(joint.calls)
    assert nodes["add_"] in effects.needed([nodes["sin"]], region)
    # Whoever takes the memory finds it changed, by whatever name.
    changed = {nodes["mul"], nodes["view"], nodes["add_"]}
    assert effects.needed([nodes["mul"]], region) == changed
    assert effects.between(nodes["mul"], nodes["sin"])
    assert not effects.between(nodes["mul"], nodes["add_"])
    assert is_view(nodes["view"])
    assert not is_view(nodes["mul"])


def test_statistics_of_a_norm_are_written_in_training_alone():
    for training in (True, False):
        norm = nn.BatchNorm1d(3).train(training)
        joint, _ = nodes_of(lambda own, x: own(x), torch.rand(4, 3), norm)
        effects = Effects(joint.module.graph.nodes)
        written = [
            any(effects.memory[x] & m for m in effects.written.values()) for x in joint.state
        ]
        assert written == [False, False, *[training] * 3]


def test_random_numbers():
    _, nodes = nodes_of(lambda x: nn.functional.dropout(x) + torch.rand_like(x), torch.rand(3))
    drawn = {name for name, x in nodes.items() if is_random(x)}
    assert drawn == {"bernoulli_", "rand_like"}
    assert not any(map(is_void, nodes.values()))


def test_bytes_count_each_storage_once():
    joint, nodes = nodes_of(lambda x: (x * 2).view(-1), torch.rand(2, 3))
    both = [*fakes_of(nodes["mul"]), *fakes_of(nodes["view"])]
    assert len(both) == 2
    assert joint.bytes_of(both) == 24
