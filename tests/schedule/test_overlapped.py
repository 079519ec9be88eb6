"""Rewrites that pair computations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import BUILT_IN, examples, schedules
from torchgpipe.schedule import Op, Overlap, fill_drain, named, parse, validate
from torchgpipe.schedule.program import operations_of

KINDS = ["FB", "FI", "FF", "BB", "II", "IW", "FW"]


def texts(schedule):
    return schedule.text.splitlines()


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


def verify(schedule, kinds):
    before = validate(schedule)
    found = schedule.overlap(*kinds)
    assert validate(found) == before == []
    # No pair is left that could be one.
    assert found.overlap(*kinds) == found
    for line, other in zip(schedule.program, found.program):
        flat = [op for x in line for op in ((x,) if isinstance(x, Op) else x)]
        assert flat == [op for x in other for op in ((x,) if isinstance(x, Op) else x)]
        new = [x for x in other if isinstance(x, Overlap) and x not in line]
        assert all("".join(sorted((x.first.kind, x.second.kind))) in ordered(kinds) for x in new)


def ordered(kinds):
    return {"".join(sorted(x)) for x in kinds}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in(name):
    verify(BUILT_IN[name](4, 8), KINDS)


@examples
@given(schedules(), st.sets(st.sampled_from(KINDS), min_size=1))
def test_random(found, kinds):
    verify(found[0] if isinstance(found, tuple) else found, [*kinds])


def test_wrong_kinds():
    for kind in ("F", "FX", "FBI", ""):
        with pytest.raises(ValueError, match="two of F, B, I, W and R"):
            named("1f1b", 2, 2).overlap(kind)


def test_pair():
    found = named("1f1b", 2, 2).pair()
    assert found.chunks == 4
    assert validate(found) == []
    assert texts(found)[1] == "(1F0;1F1) (1B0;1B1) (1F2;1F3) (1B2;1B3)"
    assert len([*operations_of(found.program)]) == 16
    with pytest.raises(ValueError, match="cannot be paired"):
        found.pair()
