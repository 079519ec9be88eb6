"""The memory of partitions: each value once, and skips between them."""

import pytest
import torch
from torch import nn

from tests.support.helpers import Scale
from tests.support.planning import Join, Keep
from torchgpipe.planner.layers import measured
from torchgpipe.planner.stage_memory import Stage, ways
from torchgpipe.values.microbatch import Batch

ROWS, CHANNELS, SIZE = 4, 2, 64
#: The bytes of what is between two layers.
UNIT = 4 * ROWS * CHANNELS * SIZE


def stages_of(*parts):
    """Partitions of some layers each."""
    layers = nn.Sequential(*[layer for part in parts for layer in part])
    batch = Batch(torch.rand(ROWS, CHANNELS, SIZE))
    device = torch.device("cpu")
    found, sizes = measured(layers, {ROWS: batch}, {ROWS: batch}, device, timeout=0)
    weights, stages, start = [x.weights for x in found], [], 0
    for part in parts:
        stages.append(Stage(sizes.at(ROWS), weights, range(start, start + len(part))))
        start += len(part)
    return stages


@pytest.mark.parametrize(
    "between",
    [nn.ReLU(inplace=True), nn.Identity(), nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 64)))],
    ids=["in place", "itself", "view"],
)
def test_one_memory_is_counted_once(between):
    (stage,) = stages_of([Scale(), between, Scale()])
    assert stage.held == UNIT
    assert stage.output == stage.loose == UNIT


def test_what_is_stashed_and_kept_is_counted_once():
    first = [Scale(), nn.ReLU(inplace=True), Keep()]
    last = [Scale(), Join(), Scale()]
    (alone,) = stages_of([*first, *last])
    # What the rectifier has made, and what was joined, which is twice as large.
    assert alone.held == 3 * UNIT
    assert not alone.arrivals
    assert not alone.leaving
    # The input of the last layers is their own, too, and so is the skip.
    before, after = stages_of(first, last)
    assert before.held == UNIT
    assert [*before.leaving.values()] == [UNIT]
    assert {*before.leaving} == before.kept
    assert [j for j, _ in ways([before, after])[1]] == [0, 0]
    assert sorted(x.is_skip for x in after.arrivals) == [False, True]
    assert all((x.size, x.gradient) == (UNIT, UNIT) for x in after.arrivals)
    # The gradient of the skip is a view of that of what was joined, for both.
    assert {x.is_skip: x.holds for x in after.arrivals} == {False: UNIT, True: 2 * UNIT}
    # What is joined is a copy.
    assert after.held == 2 * UNIT


def test_a_skip_without_a_gradient():
    _, after = stages_of([Keep()], [Scale(), Join(), Scale()])
    assert [x.gradient for x in after.arrivals] == [0, 0]


def test_backward_of_a_layer():
    first, last = stages_of([nn.Linear(SIZE, SIZE)], [nn.Tanh()])
    own = first.weights.trainable
    assert own == first.weights.small == 4 * SIZE * (SIZE + 1)
    # The gradient of the output, which stays, and that of the input.
    assert last.whole == pytest.approx([2 * UNIT] * 2, abs=4)
    # Nothing but its output is kept.
    assert (last.held, last.saver) == (UNIT, 1)
    # The first layer's input needs no gradient, so all is done at W.
    assert first.halves[0] == UNIT
    assert first.waits
    assert first.whole[0] >= UNIT + own
