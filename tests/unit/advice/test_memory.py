"""The most that cells keep, counted by hand."""

from torchgpipe.advice.memory import most
from torchgpipe.schedule import fill_drain, one_f_one_b
from torchgpipe.schedule.rewrite import checkpointed
from torchgpipe.schedule.simulator import in_order


def counted(schedule, mode="never"):
    program = checkpointed(schedule.program, mode, schedule.chunks)
    order = in_order(type(schedule)(schedule.placement, schedule.chunks, program))
    return most(order, ["a", "b"], {0: 10.0, 1: 20.0}, [0, 1])


def test_all_micro_batches_are_kept():
    assert counted(fill_drain(2, 4)) == {"a": 40, "b": 80}


def test_one_forward_one_backward_keeps_fewer():
    assert counted(one_f_one_b(2, 4)) == {"a": 20, "b": 20}


def test_inputs_are_kept_until_cells_are_computed_again():
    assert counted(fill_drain(2, 4), "always") == {"a": 10, "b": 23}
    # The last micro-batch is not computed again.
    assert counted(fill_drain(2, 4), "except_last") == {"a": 10, "b": 23}
