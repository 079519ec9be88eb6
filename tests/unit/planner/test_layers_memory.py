"""Layers recorded one by one have their backward in halves, to the byte."""

import torch
from torch import nn

from torchgpipe.planner.layers import Chain, halved
from torchgpipe.planner.sandbox import Sandbox
from torchgpipe.skip import skippable, stash
from torchgpipe.values.microbatch import Batch

ROWS, WIDTH = 4, 8
SIZE, WEIGHT = 4 * ROWS * WIDTH, 4 * (WIDTH * WIDTH + WIDTH)
CPU = torch.device("cpu")


def chain(*layers):
    """The record of layers, and the sandbox of each."""
    found, batch, sandboxes = Chain(), Batch(torch.rand(ROWS, WIDTH)), []
    for layer in layers:
        sandboxes.append(Sandbox(layer, batch, CPU))
        found.add(sandboxes[-1])
        batch = sandboxes[-1].output
    return found.record, sandboxes


def test_halves():
    tanh = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    record, _ = chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(), tanh)
    first, linear, relu, both = (x.halves for x in record.sections)
    # W does all, and nothing is kept but the gradient of the output.
    assert (first.held, first.pending, first.notes_output) == (SIZE, 0, True)
    assert first.weight == WEIGHT
    # Gradients of output and input, of which W needs the first one.
    assert (linear.held, linear.free) == (2 * SIZE, 2 * SIZE)
    assert (linear.pending, linear.noted, linear.notes_output) == (0, 0, True)
    assert linear.weight >= WEIGHT
    # It has no weights.
    assert (relu.held, relu.weight, relu.pending, relu.notes_output) == (2 * SIZE, 0, 0, False)
    # The gradient between the two is noted, and the output is let go of.
    assert (both.pending, both.noted, both.notes_output) == (SIZE, SIZE, False)
    assert (both.held, both.free) == (3 * SIZE, 2 * SIZE)
    # W of linear layers needs their inputs, which are the values before them.
    assert [x.late for x in record.values] == [{0}, {1}, set(), {3}, set()]


@skippable(stash=["skip"])
class Stash(nn.Linear):
    """A layer that returns what it stashes."""

    def forward(self, x):
        result = super().forward(x).tanh()
        yield stash("skip", result)
        return result


def test_the_sum_of_two_gradients_is_no_gradient_of_an_output():
    """Both gradients stay, but their sum goes with its last use."""
    _, sandboxes = chain(nn.Linear(WIDTH, WIDTH), Stash(WIDTH, WIDTH))
    found, _ = halved(sandboxes[-1])
    assert found.held == 4 * SIZE
