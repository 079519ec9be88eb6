"""Listings of graphs: a table for each part."""

from functools import cache

import pytest
import torch
from torch import nn

from tests.support.graphs import Stage
from torchgpipe.graphs.listing import listing


@cache
def mlp(needs_grad=True):
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return Stage(layers, torch.rand(3, 4, requires_grad=needs_grad)).parts


@cache
def convolution():
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    return Stage(layers, torch.rand(2, 3, 6, 6, requires_grad=True)).parts


@cache
def attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Stage(layer, torch.rand(2, 3, 8, requires_grad=True)).parts


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.tensor(2.0)

    def forward(self, x):
        return x * self.scale + torch.tensor([1.0, 2.0])


STAGES = {
    "mlp": mlp,
    "the first stage": lambda: mlp(needs_grad=False),
    "convolution": convolution,
    "attention": attention,
    "without weights": lambda: Stage(nn.ReLU(), torch.rand(3, requires_grad=True)).parts,
    "without operators": lambda: Stage(nn.Identity(), torch.rand(3, requires_grad=True)).parts,
    "without a backward": lambda: Stage(nn.Linear(3, 2), torch.rand(2, 3), recorded=False).parts,
    "a constant": lambda: Stage(Doubling(), torch.rand(3, 2, requires_grad=True)).parts,
}


@pytest.fixture(params=STAGES)
def parts(request):
    return STAGES[request.param]()


def columns(parts, split):
    if split:
        return {"F": parts.forward, "I": parts.input, "W": parts.weight}
    return {"F": parts.forward, "B": parts.backward}


def test_text():
    assert (
        listing(mlp(), stage=1)
        == """\
stage 1: 16 operators, 144 B saved from F, 264 B kept for W

F, forward: 5 operators, hands on 168 B
  input[0]         3x4 float32  saved[1]
  state[0]         8x4 float32
  state[1]         8 float32
  state[2]         2x8 float32
  state[3]         2 float32
  t         t      4x8 float32             state[0]
  addmm     addmm  3x8 float32             state[1], input[0], t
  relu      relu   3x8 float32  saved[0]   addmm
  t_1       t      8x2 float32             state[2]
  addmm_1   addmm  3x2 float32  output[0]  state[3], relu, t_1

I, backward for the input: 3 operators, hands on 144 B
  saved[0]            from F              3x8 float32                 relu
  state[0]                                8x4 float32
  state[2]                                2x8 float32
  tangent[0]                              3x2 float32
  mm                  mm                  3x8 float32                 tangent[0], state[2]
  threshold_backward  threshold_backward  3x8 float32  live[0]        mm, saved[0], 0
  mm_2                mm                  3x4 float32  input_grad[0]  threshold_backward, state[0]

W, backward for the weights: 8 operators, hands on 232 B
  live[0]     from I  3x8 float32                  threshold_backward
  saved[0]    from F  3x8 float32                  relu
  saved[1]    from F  3x4 float32                  input[0]
  tangent[0]          3x2 float32
  t_3         t       2x3 float32                  tangent[0]
  mm_1        mm      2x8 float32  weight_grad[2]  t_3, saved[0]
  sum_1       sum     1x2 float32                  tangent[0], [0], True
  view        view    2 float32    weight_grad[3]  sum_1, [2]
  t_7         t       8x3 float32                  live[0]
  mm_3        mm      8x4 float32  weight_grad[0]  t_7, saved[1]
  sum_2       sum     1x8 float32                  live[0], [0], True
  view_1      view    8 float32    weight_grad[1]  sum_2, [8]"""
    )


def test_text_of_an_empty_part():
    parts = STAGES["without operators"]()
    assert (
        listing(parts, split=False)
        == """\
a stage: no operators, 0 B saved from F

F, forward: no operators, hands on 12 B
  input[0]  3 float32  output[0]

B, backward: no operators, hands on 12 B
  tangent[0]  3 float32  input_grad[0]"""
    )


def test_buffers_that_change_are_marked():
    lines = listing(convolution()).splitlines()
    (norm,) = [x for x in lines if x.startswith("  native_batch_norm ")]
    assert "2x8x6x6, 8, 8 float32  changes state[4], changes state[5]  convolution" in norm
    (count,) = [x for x in lines if x.startswith("  add_ ")]
    assert "scalar int64           changes state[6]" in count


@pytest.mark.parametrize("split", [True, False])
def test_text_has_every_node(parts, split):
    sections = listing(parts, split).split("\n\n")[1:]
    for (kind, part), section in zip(columns(parts, split).items(), sections, strict=True):
        head, *lines = section.splitlines()
        assert head.startswith(f"{kind}, ")
        names = [x.split()[0] for x in lines]
        given = len(part.slice.inputs)
        assert names[:given] == [f"{role}[{k}]" for role, k in sorted(part.sources)]
        assert names[given:] == [x.name for x in part.slice.nodes]
