"""The most that cells keep, counted by hand."""

from torchgpipe.planner.memory import issued, peaks
from torchgpipe.planner.stage_memory import known
from torchgpipe.schedule import fill_drain, one_f_one_b
from torchgpipe.schedule.rewrite import checkpointed
from torchgpipe.schedule.simulator import in_order


def counted(schedule, mode="never"):
    program = checkpointed(schedule.program, mode, schedule.chunks)
    order = issued(in_order(type(schedule)(schedule.placement, schedule.chunks, program)))
    stages = known([10.0, 20.0], [0.0, 1.0])
    return peaks(order, [0, 1], stages, state=0.0, given=0.0, is_summed=True, loss=None)


def test_all_micro_batches_are_kept():
    assert counted(fill_drain(2, 4)) == [40, 80]


def test_one_forward_one_backward_keeps_fewer():
    assert counted(one_f_one_b(2, 4)) == [20, 20]


def test_inputs_are_kept_until_cells_are_computed_again():
    assert counted(fill_drain(2, 4), "always") == [10, 23]
    # The last micro-batch is not computed again.
    assert counted(fill_drain(2, 4), "except_last") == [10, 23]
