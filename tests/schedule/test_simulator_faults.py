"""The validator finds all faults at once, and nothing else."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, random_schedule, schedules
from torchgpipe.schedule import Costs, Overlap, Schedule, dualpipe_v, one_f_one_b, parse, validate
from torchgpipe.schedule.program import needs, operations, operations_of


def faults(text, placement=(0, 1), chunks=2, **arguments):
    return validate(parse(text, placement, chunks), **arguments)


def test_valid():
    assert faults("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1") == []
    assert faults("0F0 0F1 0I0 0W0 0B1\n1F0 1R0 1I0 1F1 1B1 1W0") == []
    assert faults("0F0 0F1 0B0 0B1\n1F0 (1F1;1B0) 1B1") == []


def test_missing():
    assert faults("0F0 0F1 0B0 0I1\n1F0 1B0 1W1") == [
        "missing: 0W1 on worker 0",
        "missing: 1F1 on worker 1",
        "missing: 1I1 on worker 1",
    ]
    assert faults("0F0 0F1 0B0 0B1\n1F0 1F1 1B1") == ["missing: 1B0 on worker 1"]


def test_out_of_range_and_on_another_worker():
    assert faults("0F0 0F1 1F2 0B0 0B1\n1F0 2F0 1F1 1B0 0B2 1B1") == [
        "wrong worker: 1F2 (worker 0, instruction 3); its stage is on worker 1",
        "out of range: 1F2 (worker 0, instruction 3); micro-batches are 0 to 1",
        "out of range: 2F0 (worker 1, instruction 2); stages are 0 to 1",
        "wrong worker: 0B2 (worker 1, instruction 5); its stage is on worker 0",
        "out of range: 0B2 (worker 1, instruction 5); micro-batches are 0 to 1",
    ]


def test_duplicates():
    assert faults("0F0 0F1 0B0 (0F0;0B1)\n1F0 1B0 1W0 1F1 1I1 1W1 1B1") == [
        "duplicate: 0F0 (worker 0, instruction 4); leave all but one out",
        "duplicate: 1W0, which is a part of 1B0; leave out one of the two",
        "duplicate: 1I1, which is a part of 1B1; leave out one of the two",
        "duplicate: 1W1, which is a part of 1B1; leave out one of the two",
    ]


def test_a_deadlock_is_named_in_full():
    assert faults("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1") == [
        "deadlock: 0B0 (worker 0) needs 1B0 after 1F1 (worker 1); "
        "1F1 (worker 1) needs 0F1 after 0B0 (worker 0)"
    ]


def test_a_worker_that_only_waits_for_a_deadlock_is_no_part_of_it():
    assert faults("0F0 0B0\n1F0 1B0\n2B0 2F0", (0, 1, 2), 1) == [
        "deadlock: 2B0 (worker 2) needs 2F0 after 2B0 (worker 2)"
    ]


def test_all_deadlocks_are_found():
    text = "0B0 0F0 0B1 0F1\n1F0 1B0 1F1 1B1"
    assert faults(text) == [
        "deadlock: 0B0 (worker 0) needs 0F0 after 0B0 (worker 0)",
        "deadlock: 0B1 (worker 0) needs 0F1 after 0B1 (worker 0)",
    ]


@pytest.mark.parametrize("pair", ["0F0;0B0", "0I0;0W0", "0R0;0B0"])
def test_computations_of_an_overlap_cannot_need_each_other(pair):
    text = "0F0 0R0 0I0 0W0".replace(pair.split(";")[0], f"({pair})")
    (deadlock,) = [x for x in faults(text, (0,), 1) if "deadlock" in x]
    assert deadlock.startswith(f"deadlock: ({pair}) (worker 0) needs {pair[:3]} (worker 0)")


def test_a_recomputation_comes_before_its_backward():
    assert faults("0F0 0B0 0R0", (0,), 1) == [
        "deadlock: 0B0 (worker 0) needs 0R0 after 0B0 (worker 0)"
    ]


def test_memory():
    text = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert faults(text, capacity=2) == []
    assert faults(text, capacity=[2, 1]) == []
    assert faults(text, capacity=1) == [
        "memory: worker 0 holds 2 of 1 at 0F1 (instruction 2), and 2 at most"
    ]
    costs = Costs(activation=[1, Fraction(5, 2)])
    assert faults(text, capacity=(2, 1), costs=costs) == [
        "memory: worker 1 holds 2.5 of 1 at 1F0 (instruction 1), and 2.5 at most"
    ]
    with pytest.raises(ValueError, match=r"capacity must be a number, or a list of 2"):
        faults(text, capacity=[1])


def test_rounding_does_not_exceed_a_limit():
    third = Costs(activation=0.1)
    assert validate(one_f_one_b(3, 8), capacity=0.3, costs=third) == []
    assert len(validate(one_f_one_b(3, 8), capacity=0.2999999, costs=third)) == 1


def test_all_kinds_at_once():
    found = faults("0B0 0F0 1F1 0F7\n1F0 1I0 1B1 1W1 1F0", capacity=0.5)
    kinds = [x.split(":")[0] for x in found]
    assert [*dict.fromkeys(kinds)] == [
        *("wrong worker", "out of range", "duplicate", "missing", "deadlock", "memory"),
    ]
    assert len([x for x in kinds if x == "memory"]) == 2


def can_run(schedule):
    """Run the program: start any instruction that can start, until none can."""
    ops = [*operations_of(schedule.program)]
    lines, done = [[*line] for line in schedule.program], set()
    while True:
        ready = [
            line
            for line in lines
            if line and {x for op in operations(line[0]) for x in needs(op, ops)} <= done
        ]
        if not ready:
            return not any(lines)
        for line in ready:
            done |= {*operations(line.pop(0))}


@examples
@given(st.integers(0, 2**32))
def test_an_order_of_any_kind_is_valid_if_and_only_if_it_can_run(seed):
    rng = random.Random(seed)
    schedule, _ = random_schedule(rng)
    lines = [[*line] for line in schedule.program]
    for _ in range(rng.randint(0, 3)):
        line = rng.choice(lines)
        j, k = rng.randrange(len(line)), rng.randrange(len(line))
        line[j], line[k] = line[k], line[j]
        if rng.random() < 0.2 and not any(isinstance(x, Overlap) for x in (line[j], line[j - 1])):
            line[j - 1 : j + 1] = [Overlap(line[j - 1], line[j])] if j else line[j - 1 : j + 1]
    changed = Schedule(schedule.placement, schedule.chunks, lines)
    found = validate(changed)
    assert (found == []) == can_run(changed)
    assert all(x.startswith("deadlock: ") for x in found)


@examples
@given(schedules(), st.randoms(use_true_random=False))
def test_one_instruction_less_is_one_or_two_faults(case, rng):
    schedule, _ = case
    lines = [[*line] for line in schedule.program]
    line = rng.choice(lines)
    gone = line.pop(rng.randrange(len(line)))
    found = validate(Schedule(schedule.placement, schedule.chunks, lines))
    parts = [op for op in operations(gone) if op.kind != "R"]
    expected = {f"missing: {op} on worker {schedule.placement[op.stage]}" for op in parts}
    assert {*found} == expected


def test_links_of_a_cycle_are_true():
    """A link names an instruction, a computation it needs, and the instruction before that one."""
    count = 0
    for seed in range(40):
        rng = random.Random(seed)
        lines = [[*line] for line in dualpipe_v(3, 6).program]
        for line in lines:
            j, k = rng.randrange(len(line)), rng.randrange(len(line))
            line[j], line[k] = line[k], line[j]
        program = [[str(x) for x in line] for line in lines]
        schedule = Schedule((0, 1, 2, 2, 1, 0), 6, lines)
        for fault in validate(schedule):
            count += 1
            links = [x.split(" ") for x in fault.removeprefix("deadlock: ").split("; ")]
            for link, after in zip(links, links[1:] + links[:1]):
                head, worker, needed = link[0], int(link[2][:-1]), link[4]
                assert head in program[worker]
                sources = {
                    str(x)
                    for instruction in lines[worker]
                    if str(instruction) == head
                    for op in operations(instruction)
                    for x in needs(op, {*operations_of(schedule.program)})
                }
                assert needed in sources
                line = program[int(after[2][:-1])]
                where = next(k for k, x in enumerate(line) if needed in x.strip("()").split(";"))
                assert line.index(after[0]) <= where
    assert count > 40
