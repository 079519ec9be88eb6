"""The memory of a device is added up from the sections of its blocks."""

import pytest
import torch
from torch import nn

from torchgpipe.partition.keeping import Offload
from torchgpipe.planner.blocks import recorded
from torchgpipe.planner.memory import Footprint
from torchgpipe.planner.record import GIVEN, Hop, Peaks, Record, Section, Value
from torchgpipe.planner.stage_memory import Stage, Weights


def footprint(chunks, again, state=0.0):
    """Two blocks that keep 100 bytes each, and hand on 10."""

    def section(block, k):
        peaks = Peaks(130, 130, 120, 120)
        return Section(block, block is not None, k, kept=100, forward=110, free=peaks, held=peaks)

    sections = [Section(None, False, 0), section("a", 0), section("b", 1)]
    values = [
        Value(GIVEN, 8, {1: 8}, {Hop(GIVEN, 1, False)}, {1}),
        Value(1, 10, {2: 10}, {Hop(1, 2, False)}, {2}, gradient=10),
        Value(2, 10, gradient=10, output=10),
    ]
    weights = {"a": Weights(7, 5), "b": Weights(6, 6), None: Weights(3, 0)}
    return Footprint(Record(sections, values, 8, False), weights, chunks, again, state)


def test_weights_and_states():
    found = [footprint(1, 0, state).need({None, "a"})[0] for state in (0.0, 2.0)]
    assert found[1] - found[0] == 2 * 5


def test_all_on_one_device():
    # Weights, the input, the value, the backward of b with what a keeps, and the output, whose
    # gradient that of b begins with.
    own, given, kept = 16, 8, 100 + 10
    assert footprint(1, 0).need({None, "a", "b"})[0] == own + given + kept + 130 + 2 * 10


@pytest.mark.parametrize("chunks", [3, 5])
def test_micro_batches_add_up(chunks):
    few, more = (footprint(m, 0).need({None, "a"})[0] for m in (chunks, chunks + 1))
    # Each has its part of the input, and what a keeps. Its output is gone.
    assert more - few == 100 + 8


@pytest.mark.parametrize("chunks", [3, 5])
def test_checkpoints_keep_arguments(chunks):
    few, more = (footprint(m, m).need({"b"})[0] for m in (chunks, chunks + 1))
    # The copy of the value, and the output with its gradient.
    assert more - few == 10 + 2 * 10
    assert footprint(chunks, chunks - 1).need({"b"})[0] <= footprint(chunks, 0).need({"b"})[0]


@pytest.mark.parametrize(("share", "away"), [(1.0, 11264), (0.5, 4096), (0.75, 8192)])
def test_what_leaves_of_a_cell(share, away):
    """Memory that calls alone keep leaves, first what was saved first, unless it is small."""
    calls = {"a": [4096, 512, 2048], "b": [3072]}
    sections = [Section(x, is_call) for x in calls for is_call in (True, False)]
    sections[0].pieces, sections[2].pieces, sections[3].pieces = *calls.values(), [9000]
    values = [
        Value(0, 2048, {2: 2048}, savers={2}),
        Value(0, 4096, {1: 4096, 2: 4096}, savers={1, 2}),
        Value(2, 4096, {4: 4096}, {Hop(2, 4, False)}, {2}),
        Value(2, 4096, savers={2}, output=4096),
    ]
    record = Record([*sections, Section("c", True)], values)
    assert Stage(record, [Weights()] * 5, range(4), by_call=True).away(share) == away


def test_cells_of_each_visit_leave_by_themselves():
    """Another visit of the device computes nothing between the last two cells of this one."""
    sections = [Section(x, True, kept=2048, pieces=[2048]) for x in "abc"]
    record = Record(sections, [Value(k, 8, {k + 1: 8}, {Hop(k, k + 1, False)}) for k in (0, 1)])
    for chunks, leaves in ((2, False), (4, True)):
        found = [
            Footprint(record, {}, chunks, 0, 0.0, mode).need("ac")[0] for mode in (None, Offload())
        ]
        assert (found[1] < found[0]) == leaves


@pytest.mark.parametrize("inplace", [True, False])
def test_a_checkpoint_has_a_clone_of_what_its_module_changes(inplace):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 8))
    record = recorded(model, dict(model.named_children()), (torch.rand(4, 8),), {})
    count = len(record.sections)
    stage = Stage(record, [Weights()] * count, range(count), by_call=True)
    # The inputs of the rectifier, and of the layer after it.
    assert stage.stored == 2 * 4 * 4 * 8
