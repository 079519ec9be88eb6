"""Skips through a GPipe: namespaces, copies and errors; ``tests/contract`` has their values."""

import copy

import pytest
import torch
from torch import nn

from tests.contract.layers import Pop, Stash
from tests.support.helpers import CPUS, nodes, note_of, plain, run_pipeline
from torchgpipe import GPipe
from torchgpipe.skip import skippable, stash

WIDTH = 3


def test_skip_that_was_not_stashed(device):
    """The layer that declares the skip does not run."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stash(torch.exp)

        def forward(self, x):
            return x

    layers = nn.Sequential(Block(), Pop()).to(device)
    model = GPipe(layers, [1, 1], devices=[device] * 2)
    with pytest.raises(RuntimeError, match="must be stashed by an earlier layer.*'far'") as caught:
        model(torch.rand(2, WIDTH, device=device))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0"


class Block(nn.Module):
    """A layer that stashes and pops within itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Stash(torch.exp), nn.Tanh(), Pop())

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [1, 2, 1]])
def test_blocks_that_stash_and_pop_within_themselves(balance, mode):
    """Blocks of this kind need no namespaces, even where they are repeated, copied or nested."""
    block = Block()
    module = nn.Sequential(block, Block(), nn.Sequential(Block(), Block()), copy.deepcopy(block))
    reference = copy.deepcopy(module)
    model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=mode)
    x = torch.rand(6, WIDTH)
    output = model(x)
    assert torch.equal(output, plain(reference, x, 3))
    output.sum().backward()
    plain(reference, x, 3).sum().backward()
    for p, q in zip(reference.parameters(), model.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_devices_between_see_nothing(mode):
    """A skip is copied once, straight from the device that stashed it, and not on the way."""
    partitions = [
        nn.Sequential(Stash(torch.exp)),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(Pop()),
    ]
    x = torch.rand(3, WIDTH, requires_grad=True)
    output = run_pipeline(partitions, CPUS, x, chunks=3, mode=mode)
    copies = [node for node in nodes(output) if node.name() == "CopyBackward"]
    # Three boundaries that the value crosses, and the skip.
    assert len(copies) == 3 * 4


def test_error_in_a_generator_names_the_cell(mode):
    @skippable(stash=["far"])
    class Fail(nn.Module):
        def forward(self, input):
            yield stash("far", input)
            raise KeyError("why")

    layers = nn.Sequential(nn.Linear(1, 1), Fail(), Pop())
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
    with pytest.raises(KeyError, match="why") as caught:
        model(torch.rand(2, 1))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0, layer 1 (Fail)"
