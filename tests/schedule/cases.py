"""Schedules and costs for several tests, and how many of them a test tries."""

import random
from dataclasses import replace
from fractions import Fraction
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st

from tests.support.size import some
from torchgpipe import schedule
from torchgpipe.schedule import Costs, Op, Overlap, Schedule, greedy, validate

#: Decorator of tests with random schedules: the number of examples.
examples = settings(max_examples=some(100, 20))

#: All built-in schedules, with one, two and more stages per worker.
BUILT_IN = {
    name: getattr(schedule, name)
    for name in (
        *("fill_drain", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2"),
        *("zero_bubble_v", "v_half", "v_min", "dualpipe_v"),
    )
}
for function in (schedule.interleaved, schedule.looped_bfs, schedule.interleaved_zero_bubble):
    for v in (1, 2, 3):
        BUILT_IN[f"{function.__name__}_{v}"] = partial(function, stages_per_worker=v)
for waves in (1, 2):
    BUILT_IN[f"wave_{waves}"] = partial(schedule.wave, waves=waves)


def share(found, costs=(1, 1, 1)):
    """Return costs whose F, I and W are those of all stages of a worker together."""
    v = Fraction(len(found.placement), len(found.program))
    f, i, w = (x / v for x in costs)
    return Costs(F=f, I=i, W=w, R=f, activation=1 / v)


def mixed_overlap(first, second):
    """Return a time between that of the longer computation and the sum of both."""
    return max(first, second) + min(first, second) / 2


@st.composite
def schedules(draw):
    """Make a valid schedule with costs: any placement, R, halves, overlaps."""
    return random_schedule(random.Random(draw(st.integers(0, 2**32))))


def random_schedule(rng):
    workers = rng.randint(1, 4)
    placement = [*range(workers), *rng.choices(range(workers), k=rng.randint(0, 4))]
    rng.shuffle(placement)
    n, m = len(placement), rng.randint(1, 5)
    costs = random_costs(rng, n)
    split = rng.random() < 0.6
    keys = {}
    found = greedy(
        placement, m, lambda op: keys.setdefault(op, rng.random()), split=split, costs=costs
    )
    if split and rng.random() < 0.4:
        whole = {(j, i) for j in range(n) for i in range(m) if rng.random() < 0.5}
        found = tried(found, [fused(line, whole) for line in found.program])
    if rng.random() < 0.5:
        stages = [j for j in range(n) if rng.random() < 0.6]
        found = found.recompute(stages, [i for i in range(m) if rng.random() < 0.7])
    for _ in range(rng.choice((0, 0, 8))):
        lines = [*found.program]
        w = rng.randrange(workers)
        k = rng.randrange(len(lines[w]))
        pair = lines[w][k : k + 2]
        if len(pair) == 2 and all(isinstance(x, Op) for x in pair):
            lines[w] = (*lines[w][:k], Overlap(*pair), *lines[w][k + 2 :])
            found = tried(found, lines)
    return found, costs


def random_costs(rng, stages):
    def each(low=0):
        return [Fraction(rng.randint(low, 6), rng.choice((1, 2, 3))) for _ in range(stages)]

    copy = Fraction(rng.randint(0, 3), 2)
    if rng.random() < 0.3:
        pairs = [(j, k) for j in range(stages) for k in (j - 1, j + 1)]
        copy = {pair: Fraction(rng.randint(0, 4), 2) for pair in pairs}
    return Costs(
        F=each(),
        I=each(),
        W=each(),
        R=each(),
        copy=copy,
        activation=each(),
        pending=each(),
        checkpoint=each(),
        **rng.choice([{}, {"overlap": max}, {"overlap": mixed_overlap}]),
    )


def random_skips(rng, n):
    pairs = [(j, k) for j in range(n) for k in range(j + 1, n)]
    return tuple(rng.sample(pairs, rng.randint(0, len(pairs))))


def with_copies(rng, costs, placement, skips):
    """Costs with a time for each copy, those of skips included."""
    there = [*((j, j + 1) for j in range(len(placement) - 1)), *skips]
    copies = {}
    for j, k in there:
        copies[j, k], copies[k, j] = (Fraction(rng.randint(0, 40), 10) for _ in range(2))
    return replace(costs, copy=copies)


def fused(line, whole):
    """Replace I and W by B in some cells."""
    found = []
    for op in line:
        if (op.stage, op.microbatch) not in whole:
            found.append(op)
        elif op.kind != "W":
            found.append(op._replace(kind="B") if op.kind == "I" else op)
    return found


def tried(found, lines):
    """Return the schedule with other instructions if that is valid, else unchanged."""
    changed = Schedule(found.placement, found.chunks, lines)
    return found if validate(changed) else changed
