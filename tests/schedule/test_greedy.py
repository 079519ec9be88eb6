"""List scheduling follows the priority, and a micro-batch that has begun can always end."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import examples, random_costs
from torchgpipe.schedule import Costs, Op, bounds, greedy, one_f_one_b, simulate, validate


def oldest(kinds):
    return lambda op: (kinds.index(op.kind), op.microbatch, -op.stage)


def test_backward_first_is_1f1b():
    """The capacity is the number of micro-batches that 1F1B keeps."""
    for p, m in ((1, 3), (2, 5), (4, 9), (5, 5)):
        made = greedy(range(p), m, oldest("BF"), capacity=[p - j for j in range(p)])
        assert made == one_f_one_b(p, m)


def test_forward_first_is_fill_drain():
    made = greedy([0, 1], 3, lambda op: (op.kind == "B", op.microbatch))
    assert str(made) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_a_worker_does_not_wait_for_a_better_computation():
    """0B0 arrives while 0F1 runs. When the worker was free, only 0F1 was ready."""
    made = greedy([0, 1], 3, oldest("BF"), costs=Costs(F=[2, 1], I=0.25, W=0.25))
    assert str(made).splitlines()[0] == "0F0 0F1 0B0 0F2 0B1 0B2"


def test_copies_delay():
    near = greedy([0, 1], 8, oldest("BF"))
    assert str(near).splitlines()[0].startswith("0F0 0F1 0F2 0F3 0B0 ")
    # Only outputs to stage 1 take long; gradients are as fast as before.
    far = greedy([0, 1], 8, oldest("BF"), costs=Costs(copy={(0, 1): 100, (1, 0): 0}))
    assert str(far).splitlines()[0].startswith("0F0 0F1 0F2 0F3 0F4 0F5 0F6 0F7 0B0 ")


def test_halves():
    made = greedy([0], 2, oldest("IFW"), split=True)
    assert str(made) == "0F0 0I0 0F1 0I1 0W0 0W1"
    made = greedy([0], 2, oldest("IFW"), split=True, capacity=1)
    assert str(made) == "0F0 0I0 0W0 0F1 0I1 0W1"


@examples
@given(st.integers(0, 2**32), st.booleans())
def test_any_priority_fits_into_any_memory(seed, split):
    """The placement is random, and the capacity may be just what one micro-batch needs."""
    rng = random.Random(seed)
    workers = rng.randint(1, 4)
    placement = [*range(workers), *rng.choices(range(workers), k=rng.randint(0, 4))]
    rng.shuffle(placement)
    costs = random_costs(rng, len(placement))
    chunks = rng.randint(1, 6)
    alone = simulate(greedy(placement, 1, oldest("IFW" if split else "BF"), split=split), costs)
    least = alone.peak
    if split:
        # One micro-batch needs the least memory if each W runs at once.
        least = simulate(greedy(placement, 1, oldest("WIF"), split=True), costs).peak
    capacity = [x + rng.choice((0, 0, Fraction(1, 2), 3, 10)) for x in least]
    keys = {}
    made = greedy(
        placement,
        chunks,
        lambda op: keys.setdefault(op, rng.random()),
        split=split,
        costs=costs,
        capacity=capacity,
    )
    assert validate(made, capacity, costs) == []
    assert {op.kind for line in made.program for op in line} == {*("FIW" if split else "FB")}
    limit = bounds(placement, chunks, costs, capacity).makespan
    assert limit <= simulate(made, costs).makespan


def test_a_v_in_little_memory():
    """A worker does not take every forward that fits, or the first stage would fill it."""
    placement = (0, 1, 2, 3, 3, 2, 1, 0)
    made = greedy(placement, 20, lambda op: op.kind != "F", split=True, capacity=3)
    assert validate(made, capacity=3) == []


def test_too_little_memory():
    message = r"one micro-batch .*\(worker: 1, capacity: 1, needed: 2\); give the worker more"
    with pytest.raises(ValueError, match=message):
        greedy([0, 1, 1], 4, oldest("BF"), capacity=[1, 1])
    with pytest.raises(ValueError, match="capacity must be a number, or a list of 2"):
        greedy([0, 1, 1], 4, oldest("BF"), capacity=[1])
    with pytest.raises(ValueError, match="number the workers without gaps"):
        greedy([0, 2], 4, oldest("BF"))
    assert greedy([0], 1, oldest("BF"), capacity=1).program == ((Op(0, "F", 0), Op(0, "B", 0)),)


@pytest.mark.parametrize("unit", [1e9 / 3, 1e-10 / 3, 0.1, 1e300])
def test_the_unit_of_memory_makes_no_difference(unit):
    """Rounding neither blocks a begun micro-batch nor lets another one in."""
    costs, capacity = Costs(activation=unit), sum([unit] * 3)
    made = greedy((0, 0, 0), 4, oldest("BF"), costs=costs, capacity=capacity)
    assert made == greedy((0, 0, 0), 4, oldest("BF"), capacity=3)
    assert validate(made, capacity, costs) == []
    made = greedy((0, 1), 4, oldest("FB"), costs=costs, capacity=unit)
    assert made == greedy((0, 1), 4, oldest("FB"), capacity=1)
