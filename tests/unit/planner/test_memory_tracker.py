"""Sections of a model have the memory that their operators make, and nothing of it stays."""

import copy

import pytest
import torch
from torch import nn

from torchgpipe.mapped.device_map import Wholes
from torchgpipe.planner.blocks import recorded
from torchgpipe.planner.record import GIVEN


class Tanh(nn.Module):
    """A layer that keeps its input, and its output."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x).tanh()


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.blocks = nn.ModuleList([Tanh(width), nn.Linear(width, width), Tanh(width)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, shift=None):
        for block in self.blocks:
            x = block(x)
        return self.dropout(x).sum()


ROWS, WIDTH = 4, 8
SIZE = 4 * ROWS * WIDTH


def record(model, *args, **kwargs):
    return recorded(model, Wholes.of(model).blocks(), args, kwargs)


def test_sections_and_values():
    found = record(Model(), torch.rand(ROWS, WIDTH))
    calls = [x for x in found.sections if x.is_call]
    assert [x.block for x in calls] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found.given == SIZE
    assert found.has_loss
    # The output of addmm, and that of tanh; the first one is gone after it.
    assert [x.forward for x in calls] == [2 * SIZE, SIZE, 2 * SIZE]
    # What a call keeps, and others use, is a value.
    assert [x.kept for x in calls] == [0, 0, 0]
    first, *_ = [x for x in found.values if x.made == GIVEN]
    assert (first.size, first.users, first.gradient) == (SIZE, {1: SIZE}, 0)
    assert first.savers == {1}
    second, *_ = [x for x in found.values if x.made == 1]
    assert (second.size, second.users, second.savers) == (SIZE, {3: SIZE}, {1, 3})
    assert second.gradient == SIZE
    own = 4 * (WIDTH * WIDTH + WIDTH)
    # Its output's gradient, that of its input, and those of its weights.
    assert calls[1].free.first == 2 * SIZE + own
    assert calls[1].free.adding == 2 * SIZE + 4 * WIDTH * WIDTH


def test_outputs_without_a_loss():
    found = record(nn.Sequential(nn.Linear(8, 8)), torch.rand(ROWS, 8))
    assert not found.has_loss
    (output,) = [x for x in found.values if x.output]
    assert (output.output, output.gradient) == (SIZE, SIZE)


def test_a_model_without_gradients():
    model = Model().requires_grad_(False)
    found = record(model, torch.rand(ROWS, WIDTH))
    assert not found.has_loss
    assert not any(x.kept or x.free.first for x in found.sections)


def test_nothing_changes():
    model = Model().eval()
    model.blocks[0].layer.weight.grad = torch.ones(WIDTH, WIDTH)
    x, shift, called = torch.rand(ROWS, WIDTH), torch.rand(3), []
    before, state = copy.deepcopy(model), torch.random.get_rng_state()
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(called.append)
    record(model, x, shift=shift)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert torch.equal(model.blocks[0].layer.weight.grad, torch.ones(WIDTH, WIDTH))
    assert model.blocks[1].weight.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not model.training
    assert not called
    assert not model.blocks[0]._forward_hooks


def test_blocks_that_call_others_are_one_section():
    model = Model()
    model.blocks[0].add_module("again", model.blocks[1])
    model.blocks[0].forward = lambda x: model.blocks[1](model.blocks[0].layer(x))
    found = record(model, torch.rand(ROWS, WIDTH))
    calls = [x.block for x in found.sections if x.is_call]
    assert calls == ["blocks.0", "blocks.1", "blocks.2"]


def test_what_the_last_operator_uses_up_is_in_its_section():
    model = nn.Sequential(nn.Embedding(5, WIDTH), nn.Linear(WIDTH, WIDTH))
    first, *_ = [x for x in record(model, torch.arange(ROWS)).sections if x.is_call]
    # The gradient of its output, and that of its weight. That of the root is a number.
    assert first.free.first == pytest.approx(SIZE + 4 * 5 * WIDTH, abs=4)
