"""Rewrites keep a schedule valid, and refuse arguments that do not fit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import BUILT_IN, examples, schedules
from torchgpipe.schedule import Costs, fill_drain, named, one_f_one_b, parse, simulate, validate
from torchgpipe.schedule.program import operations_of
from torchgpipe.schedule.rewrite import with_modes


def rewritten(text, change, chunks=2):
    return str(change(parse(text, [0], chunks)))


def test_split():
    assert rewritten("0F0 0B0 (0F1;0B1)", lambda x: x.split()) == "0F0 0I0 0W0 (0F1;0I1) 0W1"


def test_defer_weights():
    text = "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2"
    assert rewritten(text, lambda x: x.defer_weights(0), 3) == text
    assert rewritten(text, lambda x: x.defer_weights(1), 3) == text.replace(
        "0W0 0I1 0W1 0I2 0W2", "0I1 0W0 0I2 0W1 0W2"
    )
    last = "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2"
    assert rewritten(text, lambda x: x.defer_weights(9), 3) == last
    # A W that is due does not wait for a W that is not.
    mixed = "0F0 0F1 0F2 0I0 0I1 0W1 0W0 0I2 0W2"
    assert rewritten(mixed, lambda x: x.defer_weights(1), 3) == mixed.replace(
        "0W1 0W0 0I2", "0W0 0I2 0W1"
    )
    # A W that is late enough keeps its place.
    assert rewritten(last, lambda x: x.defer_weights(1), 3) == last


def test_recompute():
    text = "0F0 0F1 0B1 0I0 0W0"
    assert rewritten(text, lambda x: x.recompute()) == "0F0 0F1 0R1 0B1 0R0 0I0 0W0"
    assert rewritten(text, lambda x: x.recompute(microbatches=0)) == "0F0 0F1 0B1 0R0 0I0 0W0"
    assert rewritten(text, lambda x: x.recompute(stages=[])) == text
    early = "0F0 0R0 (0F1;0B0) 0B1"
    assert rewritten(early, lambda x: x.recompute()) == "0F0 0R0 (0F1;0B0) 0R1 0B1"


def test_first():
    text = "0F0 0F1 (0F2;0B0) (0B1;0B2)"
    assert rewritten(text, lambda x: x.first(2), 3) == "0F0 0F1 0B0 0B1"
    assert parse(text, [0], 3).first(2).chunks == 2


@examples
@given(schedules())
def test_halves(case):
    schedule, _ = case
    halves = schedule.split()
    assert validate(halves) == []
    assert {op.kind for line in halves.program for op in line if len(op) == 3} <= {*"FIWR"}


@examples
@given(schedules(), st.integers(0, 6), st.booleans())
def test_rewrites_keep_a_schedule_valid(case, k, each):
    schedule, costs = case
    late = schedule.split().defer_weights([k] * len(schedule.program) if each else k)
    assert validate(late) == []
    again = late.recompute()
    assert validate(again) == []
    assert again.recompute() == again
    assert validate(schedule.first((schedule.chunks + 1) // 2)) == []
    before, after = simulate(schedule.split(), costs), simulate(late, costs)
    assert {*before.start} == {*after.start}
    for line, late_line in zip(schedule.split().program, late.program):
        rest = [x for x in line if "W" not in str(x) or len(x) == 2]
        assert rest == [x for x in late_line if "W" not in str(x) or len(x) == 2]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_schedules_can_be_rewritten(name):
    schedule = BUILT_IN[name](3, 6)
    for changed in (schedule.split(), schedule.recompute(), schedule.first(4)):
        assert validate(changed) == []


def test_recomputing_is_gpipe():
    """The limits of GPipe's checkpoint modes; tests/virtual runs them in virtual time."""
    for n, m in ((4, 8), (8, 32), (2, 3)):
        for f, i, w, r in ((1, 1, 1, 1), (2, 3, 1, 2)):
            costs, b = Costs(f, i, w, r), i + w
            gpipe = fill_drain(n, m)
            fill = (m + n - 1) * f
            assert simulate(gpipe, costs).makespan == fill + (m + n - 1) * b
            except_last = gpipe.recompute(microbatches=range(m - 1))
            time = fill + m * b + (m - 1) * r + (n - 1) * b
            assert simulate(except_last, costs).makespan == time
            always = gpipe.recompute()
            assert simulate(always, costs).makespan == fill + m * (r + b) + (n - 1) * b
            kept = Costs(checkpoint=0.125)
            assert {*simulate(always, kept).peak} == {(m - 1) * 0.125 + 1}


def test_arguments_that_do_not_fit_are_errors():
    schedule = one_f_one_b(2, 3)
    with pytest.raises(
        ValueError, match=r"split into I and W \(instruction: 0B0\); call split\(\)"
    ):
        schedule.defer_weights(1)
    for k in ([1], [1, 2, 3], -1, [0, -1], 1.5, "12", None):
        with pytest.raises(ValueError, match=r"k must be .*workers: 2\)"):
            schedule.split().defer_weights(k)
    with pytest.raises(ValueError, match=r"stages must be .*\[2, 0\], in the schedule: \[0, 1\]"):
        schedule.recompute(stages=[2, 0])
    with pytest.raises(ValueError, match=r"microbatches must be"):
        schedule.recompute(microbatches=range(4))
    for chunks in (0, 4):
        with pytest.raises(ValueError, match=r"chunks"):
            schedule.first(chunks)


def text(program):
    return [" ".join(map(str, line)) for line in program]


def test_modes_of_checkpoints():
    program = one_f_one_b(2, 2).program
    assert with_modes(program, "never", 2) == program
    assert text(with_modes(program, "always", 2)) == [
        "0F0 0F1 0R0 0B0 0R1 0B1",
        "1F0 1R0 1B0 1F1 1R1 1B1",
    ]
    # What follows its forward at once would free nothing.
    assert text(with_modes(program, "except_last", 2)) == [
        "0F0 0F1 0R0 0B0 0B1",
        "1F0 1B0 1F1 1B1",
    ]


def test_a_mode_for_each_stage():
    program = one_f_one_b(2, 2).program
    first, second = program
    always = [line.split() for line in text(with_modes(program, "always", 2))]
    assert with_modes(program, ["never", "never"], 2) == program
    assert [line.split() for line in text(with_modes(program, ("always", "never"), 2))] == [
        always[0],
        [*map(str, second)],
    ]
    assert [line.split() for line in text(with_modes(program, ["never", "always"], 2))] == [
        [*map(str, first)],
        always[1],
    ]


def test_stages_of_one_worker_have_modes_of_their_own():
    program = named("zbv", 2, 2).program
    found = with_modes(program, ["never", "always", "except_last", "never"], 2)
    again = {(op.stage, op.microbatch) for op in operations_of(found) if op.kind == "R"}
    assert again == {(1, 0), (1, 1), (2, 0)}


def test_recomputation_beside_an_overlap():
    program = parse("0F0 0F1 (0F2;0B0) 0B1 0B2", [0], 3).program
    assert text(with_modes(program, "except_last", 3)) == ["0F0 0F1 0R0 (0F2;0B0) 0R1 0B1 0B2"]


def test_recomputation_of_its_own_stays():
    program = one_f_one_b(2, 2).recompute(stages=[0]).program
    for mode in ("never", "except_last", "always"):
        assert with_modes(program, mode, 2) == program


@examples
@given(schedules(), st.data())
def test_each_stage_is_recomputed_as_under_its_mode_alone(case, data):
    schedule, _ = case
    m, stages = schedule.chunks, len(schedule.placement)
    some = st.sampled_from(["never", "except_last", "always"])
    modes = data.draw(st.lists(some, min_size=stages, max_size=stages))
    found = replace(schedule, program=with_modes(schedule.program, modes, m))
    assert validate(found) == []
    for j, mode in enumerate(modes):
        alone = with_modes(schedule.program, mode, m)
        own, other = (
            [op for op in operations_of(x) if op.stage == j] for x in (found.program, alone)
        )
        assert own == other


@examples
@given(schedules(), st.sampled_from(["never", "except_last", "always"]))
def test_checkpoint_modes_keep_a_schedule_valid(case, mode):
    schedule, _ = case
    m = schedule.chunks
    found = replace(schedule, program=with_modes(schedule.program, mode, m))
    assert validate(found) == []
    assert with_modes(found.program, mode, m) == found.program
    rest = [[x for x in line if x[1] != "R"] for line in found.program]
    assert rest == [[x for x in line if x[1] != "R"] for line in schedule.program]
    again = {(op.stage, op.microbatch) for op in operations_of(found.program) if op.kind == "R"}
    cells = {(op.stage, op.microbatch) for op in operations_of(found.program)}
    if any(op.kind == "R" for op in operations_of(schedule.program)) or mode == "never":
        assert found == schedule
    elif mode == "always":
        assert again == cells
    else:
        assert again <= {(j, i) for j, i in cells if i < m - 1}


def test_unknown_mode():
    with pytest.raises(AssertionError):
        with_modes(one_f_one_b(2, 2).program, "often", 2)
    with pytest.raises(AssertionError):
        with_modes(one_f_one_b(2, 2).program, ["never", "often"], 2)
