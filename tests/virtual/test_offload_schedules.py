"""Cells of schedules whose saved tensors are in the memory of the host."""

import pytest
import torch

from tests.support.helpers import assert_no_races, wrap
from tests.support.offload import Attention
from tests.support.size import some
from tests.virtual.stages import SEEDS
from torchgpipe import Offload, ScheduledLoss
from torchgpipe.engine.step_plan import plan
from torchgpipe.schedule import Op
from torchgpipe.testing import observe

M = 4
#: Operators of a block of attention: F = 6 and B = 12.
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}

PLACES = {
    "1f1b": [0, 1, 2, 3],
    "zbh1": [0, 1, 2, 3],
    "zbv": [0, 1, 1, 0],
    "interleaved_1f1b": [0, 1, 0, 1],
    "dualpipev": [0, 1, 1, 0],
}


def squares(output):
    return output.pow(2).mean()


def training(devices, mode, name, places):
    torch.manual_seed(0)
    places = [devices[k] for k in places]
    model = wrap([Attention() for _ in places], places, mode, M, balance=[1] * len(places))
    return ScheduledLoss(model, squares, name)


def trained(step, devices, *, jitter=None, **options):
    """The gradients of the second of two steps, and what was observed in it."""
    for k in range(2):
        step.zero_grad()
        torch.manual_seed(k)
        x = torch.rand(2 * M, 16, 32, device=devices[0])
        with observe(jitter=jitter, costs=COSTS, **options) as seen:
            step(x).backward()
    assert_no_races(seen)
    return [x.grad.cpu() for x in step.parameters()], seen


@pytest.mark.parametrize("mode", some(["offload", Offload(share=0.5)], ["offload"]), ids=str)
@pytest.mark.parametrize("name", some([*PLACES], ["zbv"]))
def test_gradients_are_the_same_bit_by_bit(devices, name, mode):
    expected, never = trained(training(devices, "never", name, PLACES[name]), devices)
    step = training(devices, mode, name, PLACES[name])
    for seed in [None, *SEEDS[:1]]:
        found, seen = trained(step, devices, jitter=seed)
        assert all(map(torch.equal, found, expected))
    assert seen.makespan == never.makespan
    assert seen.transfers[0, "cpu"].bytes > 0


def test_cells_that_leave(devices):
    """A cell leaves where three computations of its worker lie between forward and backward."""

    def leaving(name, *modes):
        return plan(name, devices[:4], 6, modes, [], forward=False).leaving

    every = [Offload()] * 4
    assert leaving("1f1b", *["never"] * 4) == {}
    found = leaving("1f1b", *every)
    # On the last two workers, at most two other computations lie between.
    assert {j for j, _ in found} == {0, 1}
    assert found[0, 1] == Op(0, "F", 4)
    assert leaving("1f1b", "always", *every[1:]) == {x: y for x, y in found.items() if x[0]}
    # All but the last two, and an I is a backward.
    assert {i for j, i in leaving("fill_drain", *every) if j == 3} == {0, 1, 2, 3}
    assert leaving("zbh1", *every)


def test_stages_that_are_graphs_do_not_offload(devices):
    step = training(devices, "offload", "1f1b", [0, 1])
    step.stages = "graph"
    with pytest.raises(ValueError, match=r"a stage that is a graph keeps all .*'offload'"):
        trained(step, devices)
