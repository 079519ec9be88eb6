"""Schedules are made for a model, and checked against it."""

from functools import partial

import pytest
import torch

from torchgpipe.engine.pipeline import clock_cycles
from torchgpipe.engine.step_plan import plan
from torchgpipe.schedule import (
    Schedule,
    fill_drain,
    interleaved,
    named,
    one_f_one_b,
    parse,
    simulate,
)

CPUS = [torch.device("cpu")] * 4
GPUS = [torch.device("cuda", k) for k in range(4)]


def make(choice, devices=GPUS, m=8, mode="never", skips=(), forward=False):
    return plan(choice, devices, m, mode, skips, forward=forward)


def test_v():
    made = make("zbv", [*GPUS[:2], *GPUS[1::-1]])
    assert made.schedule == named("zbv", 2, 8)
    assert made.devices == (GPUS[0], GPUS[1])


@pytest.mark.parametrize("devices", [[*GPUS[:2]] * 3, CPUS + CPUS[:2]])
def test_stages_per_worker_follow_from_the_model(devices):
    made = make("interleaved", devices)
    assert len(made.schedule.placement) == 6


@pytest.mark.parametrize(("name", "workers"), [("1f1b", 4), ("zbv", 2), ("wave", 2)])
def test_number_of_workers_on_the_cpu(name, workers):
    assert len(make(name, CPUS).schedule.program) == workers


def test_fewer_micro_batches():
    assert make(one_f_one_b(4, 8), m=3).schedule == one_f_one_b(4, 8).first(3)


def test_order_is_that_of_simulated_starts():
    made = make("zbh1")
    start = simulate(made.schedule).start
    found = [start[op] for _, op, _ in made.order]
    assert found == sorted(found)
    assert len(found) == 4 * 8 * 3


def test_skips_are_needs():
    made = make("1f1b", skips=[(0, 2)])
    edges = next(edges for _, x, edges in made.order if str(x) == "2F0")
    assert {str(source) for source, _ in edges} == {"0F0", "1F0"}


def test_instructions_of_other_workers_that_an_instruction_needs():
    made = make("1f1b", skips=[(0, 2)])
    names = [str(x) for _, x, _ in made.order]
    needed = {name: {names[k] for k in needs} for name, needs in zip(names, made.needs)}
    assert needed["0F0"] == set()
    assert needed["2F1"] == {"1F1", "0F1"}
    # Its own forward is on the same worker.
    assert needed["1B3"] == {"2B3"}
    assert made.needs is made.needs


def test_an_overlap_is_one_instruction_to_those_that_need_it():
    text = "0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1B1"
    made = make(parse(text, (0, 1), 2), GPUS[:2], 2)
    names = [str(x) for _, x, _ in made.order]
    needed = {name: {names[k] for k in needs} for name, needs in zip(names, made.needs)}
    assert needed["(1F1;1B0)"] == {"0F1"}
    assert needed["0B0"] == {"(1F1;1B0)"}


def test_workers_of_one_device_have_lines():
    assert make("1f1b", CPUS).lines == [0, 1, 2, 3]
    assert make("1f1b").lines == [0] * 4


def test_except_last():
    made = make("1f1b", m=4, mode="except_last")
    # The last stage runs each backward right after its forward.
    assert made.again == {(j, i) for j in range(3) for i in range(3)}
    assert make("fill_drain", m=4, mode="except_last").again == {
        (j, i) for j in range(4) for i in range(3)
    }


@pytest.mark.parametrize(
    ("choice", "devices", "m"),
    [
        ("zbv", GPUS, 8),
        (one_f_one_b(3, 8), GPUS, 8),
        (one_f_one_b(4, 2), GPUS, 8),
        (partial(interleaved, stages_per_worker=2), GPUS, 8),
        ("1f1b", GPUS[:2] * 2, 8),
        (Schedule((0, 1, 1, 0), 1, named("zbv", 2, 1).program), GPUS, 1),
    ],
)
def test_schedule_that_does_not_fit(choice, devices, m):
    with pytest.raises(ValueError, match="as many stages as partitions") as error:
        make(choice, devices, m)
    assert str([str(device) for device in devices]) in str(error.value)
    assert f"of the mini-batch: {m}" in str(error.value)


def test_schedule_with_faults():
    schedule = parse("0F0 0F1 0B0", [0], 2)
    with pytest.raises(ValueError, match="a schedule must be valid") as error:
        make(schedule, CPUS[:1], 2)
    assert "missing: 0B1" in str(error.value)


def test_fill_drain_is_the_order_of_gpipe():
    cells = [(i, j) for cycle in clock_cycles(5, 3) for i, j in cycle]
    order = make(fill_drain(3, 5), GPUS[:3], 5).order
    found = [(op.microbatch, op.stage) for _, op, _ in order if op.kind == "F"]
    # Within a clock cycle nothing waits for anything else.
    assert sorted(found, key=lambda cell: (sum(cell), -cell[0])) == cells
    assert [sum(cell) for cell in found] == [sum(cell) for cell in cells]
