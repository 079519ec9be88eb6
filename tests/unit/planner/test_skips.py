"""Skips between partitions, as a plan counts them."""

from torch import nn

from tests.support.planning import Join, Keep
from tests.unit.planner.test_blocks import ROWS, UNIT, Scale, layers_of
from torchgpipe.planner.stages import stage_of, ways


def test_what_is_stashed_and_kept_is_counted_once():
    found = layers_of(Scale(), nn.ReLU(inplace=True), Keep(), Scale(), Join(), Scale())
    alone = stage_of(found, ROWS, None)
    # What the rectifier has made, and what was joined, which is twice as large.
    assert alone.kept == 3 * UNIT
    assert not alone.stashed
    assert not alone.popped
    # The input of the last layer is its own, too.
    stages = [stage_of(found[:3], ROWS, None), stage_of(found[3:], ROWS, found[2])]
    ((skip, first),) = stages[0].stashed.items()
    last = stages[1].popped[skip]
    assert ways(stages) == {(0, 1): [skip]}
    assert (first.size, first.gradient) == (UNIT, UNIT)
    assert (last.size, last.gradient) == (UNIT, UNIT)
    assert first.keeps
    assert first.is_output
    # What is joined is a copy. But both gradients are views of one.
    assert not last.keeps
    assert last.holds == 2 * UNIT


def test_a_skip_without_a_gradient():
    found = layers_of(Keep(), Scale(), Join(), Scale())
    assert stage_of(found[:1], ROWS, None).stashed.popitem()[1].gradient == 0
    assert stage_of(found[1:], ROWS, found[0]).popped.popitem()[1].gradient == 0
