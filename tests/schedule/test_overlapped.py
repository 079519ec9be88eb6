"""Rewrites that pair computations."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import BUILT_IN, examples, random_skips, schedules
from torchgpipe.schedule import Op, Overlap, Schedule, fill_drain, named, parse, validate
from torchgpipe.schedule.program import operations_of, walk

KINDS = ["FB", "FI", "FF", "BB", "II", "IW", "FW", "RB", "FR"]


def texts(schedule):
    return str(schedule).splitlines()


def test_forward_beside_backward():
    found = texts(named("1f1b", 2, 3).overlap())
    assert found == ["0F0 (0F1;0B0) (0F2;0B1) 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_forwards_and_backwards():
    found = texts(fill_drain(2, 3).overlap("FF", "BB"))
    assert found == ["(0F0;0F1) 0F2 (0B2;0B1) 0B0", "(1F0;1F1) 1F2 (1B2;1B1) 1B0"]


def test_a_dependency_by_way_of_another_worker_forbids_it():
    schedule = parse("0F0 1F0\n", [0, 0], 1)
    assert schedule.overlap("FF") == schedule
    # 2F0 needs 0F0 by way of the other worker.
    schedule = parse("0F0 2F0\n1F0", [0, 1, 0], 1)
    assert schedule.overlap("FF") == schedule


def test_pairs_that_would_wait_for_each_other():
    """Each pair alone is possible, and both are not."""
    schedule = parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", [0, 1], 2)
    found = schedule.overlap("FF", "FB", "BB")
    assert not [x for x in validate(found) if "deadlock" in x]
    assert texts(found) == ["(0F0;0F1) (0B0;0B1)", "1F0 (1B0;1F1) 1B1"]


def test_what_follows_a_pair_waits_for_both():
    """1F2 needs 0F2, which comes after 0B0, which needs 1B0."""
    lines = ["0F0 0F1 0B0 0F2 0B2 0B1", "1F0 1B0 1F2 1B2 1F1 1B1"]
    found = texts(parse("\n".join(lines), [0, 1], 3).overlap("FB"))
    assert found == ["0F0 (0F1;0B0) 0F2 0B2 0B1", "1F0 1B0 1F2 (1B2;1F1) 1B1"]


def test_a_pair_comes_behind_all_that_it_needs():
    """4F1 needs 3F1, which starts with 2F0, which needs 0F0 by way of a third worker."""
    found = texts(parse("3F1 2F0\n0F0 4F1\n1F0", [1, 2, 0, 0, 1], 2).overlap("FF"))
    assert found == ["(3F1;2F0)", "0F0 4F1", "1F0"]


def test_needs_behind_a_deadlock():
    """0B1 needs 0F1, although neither is ever computed."""
    schedule = parse("0B0 0R0 0F0 0F1 0B1", [0], 2)
    assert schedule.overlap("FB") == schedule


def test_a_skip_forbids_it():
    schedule = parse("0F0 2F0\n1F0", [0, 1, 0], 1)
    alone = replace(schedule, program=(schedule.program[0], ()))
    assert texts(alone.overlap("FF"))[0] == "(0F0;2F0)"
    skipping = replace(alone, skips=[(0, 2)])
    assert skipping.overlap("FF") == skipping


def test_recomputation_is_not_paired_by_default():
    schedule = parse("0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2", [0], 3)
    assert str(schedule.overlap()) == "0F0 0F1 0R0 (0B0;0F2) 0R1 0B1 0R2 0B2"
    assert str(schedule.overlap("RF")) == "0F0 (0F1;0R0) 0B0 (0F2;0R1) 0B1 0R2 0B2"


def test_overlaps_stay():
    schedule = parse("0F0 0F1 (0F2;0B0) 0B1 0B2", [0], 3)
    assert str(schedule.overlap("FF", "BB")) == "(0F0;0F1) (0F2;0B0) (0B1;0B2)"


def flat(program):
    return [[*operations_of((line,))] for line in program]


def by_walking(schedule, kinds):
    """Pair as the rewrite does, but walk the whole schedule for each pair."""
    lines = [[*line] for line in schedule.program]
    for line in lines:
        k = 0
        while k + 1 < len(line):
            a, b = line[k : k + 2]
            if {type(a), type(b)} == {Op} and {a.kind + b.kind, b.kind + a.kind} & {*kinds}:
                line[k : k + 2] = [Overlap(a, b)]
                done = sum(1 for _ in walk(lines, lambda waiting: None, schedule.skips))
                if done < sum(map(len, lines)):
                    line[k : k + 1] = [a, b]
            k += 1
    return replace(schedule, program=lines)


def verify(schedule, kinds):
    assert validate(schedule) == []
    found = schedule.overlap(*kinds)
    assert validate(found) == []
    assert flat(found.program) == flat(schedule.program)
    for line, other in zip(schedule.program, found.program):
        assert {x for x in line if isinstance(x, Overlap)} <= {*other}
    # No pair is left that could be one.
    assert found.overlap(*kinds) == found
    return found


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    schedule = BUILT_IN[name](4, 8)
    verify(schedule, KINDS)
    verify(schedule, ["FB", "FI"])
    verify(schedule.recompute(), KINDS)
    verify(schedule.split().defer_weights(2), ["FI", "IW", "FW"])
    small = BUILT_IN[name](3, 4)
    assert small.overlap(*KINDS) == by_walking(small, KINDS)


@examples
@given(schedules(), st.sets(st.sampled_from(KINDS), min_size=1), st.integers(0, 99))
def test_random(case, kinds, seed):
    schedule, _ = case
    skips = random_skips(random.Random(seed), len(schedule.placement))
    for one in (schedule, replace(schedule, skips=skips)):
        if not validate(one):
            assert verify(one, [*kinds]) == by_walking(one, kinds)


OPS = st.builds(Op, st.integers(0, 2), st.sampled_from("FBIWR"), st.integers(0, 1))
LINES = st.lists(st.one_of(OPS, st.builds(Overlap, OPS, OPS)), max_size=6)


@examples
@given(LINES, LINES)
def test_faulty_schedules_keep_their_computations(one, other):
    schedule = Schedule([0, 1, 0], 2, [one, other])
    found = schedule.overlap(*KINDS)
    assert flat(found.program) == flat(schedule.program)


def test_wrong_kinds():
    for kind in ("F", "FX", "FBI", "", "fb", None, ["F", "B"]):
        with pytest.raises(ValueError, match=r"two of F, B, I, W and R \(kinds: \[.*\]\); write"):
            named("1f1b", 2, 2).overlap(kind)


def test_pair():
    found = named("1f1b", 2, 2).pair()
    assert found.chunks == 4
    assert validate(found) == []
    assert texts(found)[1] == "(1F0;1F1) (1B0;1B1) (1F2;1F3) (1B2;1B3)"
    assert len([*operations_of(found.program)]) == 16
    with pytest.raises(ValueError, match="cannot be paired"):
        found.pair()
