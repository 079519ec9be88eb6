"""The limit of the schedule, exactly, whatever the timing of the host."""

from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.critical import step_path
from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.size import some
from tests.virtual.stages import (
    ONE_MODE,
    SEEDS,
    WIDER,
    Lagging,
    Popping,
    Stage,
    Stashing,
    limit,
    makespans,
    own_streams,
)
from torchgpipe.devices.pool import StreamPool
from torchgpipe.testing import observe

#: One micro-batch, fewer than there are partitions, as many, and more; `make soak` takes all.
SIZES = some([*product((2, 4, 8), (1, 4, 8, 32))], [(2, 1), (8, 4), (4, 4), (4, 16)])

#: Eight places for partitions, by the index of their device.
SHARED = {
    "one device": [0] * 8,
    "neighbours share": [0, 0, 1, 1, 2, 2, 3, 3],
    "in turns": [0, 1] * 4,
}

#: Sizes, and which of them share how.
PLACES = [(*size, place) for size, place in product([(2, 4), (4, 8), (8, 8)], SHARED)]
PLACES = some(PLACES, PLACES[::4])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_the_limit_of_all_sizes(devices, n, m, mode):
    test_the_limit(devices, n, m, mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m"), [(4, 8)])
def test_the_limit(devices, n, m, mode):
    model = wrap([Stage() for _ in range(n)], devices[:n], mode, m)
    for seed in SEEDS:
        with own_streams(devices, wanted=seed % 3 == 1):
            steps = 1 if seed else 2
            found = makespans(model, seed=seed, requires_grad=bool(seed % 2), steps=steps)
        assert found == [limit(mode, n, m)] * steps, f"jitter {seed}"


def test_the_limits_that_the_readme_draws():
    assert [limit(mode, 4, 8) for mode in MODES] == [33, 40, 41]
    assert [limit(mode, 8, 32) for mode in MODES] == [117, 148, 149]
    assert limit("except_last", 4, 4) == 24


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "m", "place"), PLACES)
def test_partitions_that_share_devices_overlap(devices, n, m, mode, place):
    model = wrap(
        [Stage() for _ in range(n)], [devices[k] for k in SHARED[place][:n]], mode, chunks=m
    )
    for seed in SEEDS[::4]:
        with own_streams(devices, wanted=m == 8):
            found = makespans(model, seed=seed, requires_grad=n == 4)
        assert found == [limit(mode, n, m)] * 2, f"jitter {seed}"


@pytest.mark.parametrize("n", some([1, 2], [1]))
def test_the_callers_streams_may_be_others_in_each_step(devices, n):
    """The caller's streams come from the same pool, and slow ours down in no step."""
    model = wrap(
        [Stage() for _ in range(2)], [devices[0]] * 2 if n == 1 else devices[:2], "never", chunks=2
    )
    for _ in range(33):
        with own_streams(devices):
            assert makespans(model, rows=1, steps=1) == [limit("never", 2, 2)]


@pytest.mark.parametrize("mode", some(MODES, ["always"]))
def test_more_micro_batches_than_streams(devices, mode):
    """CUDA has 32 streams on each device."""
    model = wrap([Stage() for _ in range(2)], devices[:2], mode, 40)
    assert makespans(model, seed=0, rows=1, steps=1) == [limit(mode, 2, 40)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("requires_grad", "j"), some([*product([False, True], [0, 1])], [(False, 0), (True, 1)])
)
def test_a_host_that_is_slow_takes_no_time(devices, mode, requires_grad, j):
    """The next partition gets ahead of a slow one by as many micro-batches as copy streams."""
    stages = [Stage(), Stage(), Stage()]
    stages[j] = Lagging()
    with patch.object(StreamPool, "COPIES", 4):
        model = wrap(stages, devices[:3], mode, 16)
        found = makespans(model, rows=1, requires_grad=requires_grad)
    assert found == [limit(mode, 3, 16)] * 2


@pytest.mark.parametrize("mode", ONE_MODE)
@pytest.mark.parametrize("requires_grad", [True, False])
def test_few_copy_streams_do(devices, mode, requires_grad):
    with patch.object(StreamPool, "COPIES", 4):
        model = wrap([Stage() for _ in range(4)], devices[:4], mode, 16)
        for seed in SEEDS[::2]:
            found = makespans(model, seed=seed, rows=1, requires_grad=requires_grad)
            assert found == [limit(mode, 4, 16)] * 2


#: Times that add up without rounding.
TIMES = st.integers(1, 32).map(lambda x: x / 8)


@st.composite
def pipelines(draw):
    """Stages of several costs, with links that are slow, and a skip over some of them."""
    n = draw(st.integers(1, 6))

    def each(times):
        return draw(st.lists(times, min_size=n, max_size=n))

    forward = each(TIMES)
    copies = [draw(st.integers(0, int(8 * f) - 1)) / 8 for f in forward[1:]]
    skip = None
    if n > 2 and draw(st.booleans()):
        a = draw(st.integers(0, n - 3))
        skip = (a, draw(st.integers(a + 2, n - 1)), draw(st.integers(0, 40)) / 8)
    return forward, each(TIMES), each(TIMES), copies, skip


@settings(max_examples=some(40 * len(SEEDS) // 3, 8))
@given(pipelines(), st.sampled_from(MODES), st.integers(1, 9), st.booleans())
def test_unequal_stages_and_copies_take_as_long_as_the_ideal(devices, pipeline, mode, m, grad):
    forward, recompute, backward, copies, skip = pipeline
    n = len(forward)
    kinds = [Stage] * n
    if skip:
        kinds[skip[0]], kinds[skip[1]] = Stashing, Popping
    stages = [kind(*costs) for kind, *costs in zip(kinds, forward, recompute, backward)]
    # A micro-batch of one row has four numbers of four bytes.
    slow = [(j, j + 1, copy, 16) for j, copy in enumerate(copies)]
    slow += [(*skip, 16 * WIDER)] if skip else []
    links = {}
    for a, b, copy, size in slow:
        if copy:
            links |= {(a, b): size / copy, (b, a): size / copy}
    found = makespans(
        wrap(stages, devices[:n], mode, m),
        rows=1,
        seed=m,
        requires_grad=grad,
        bandwidth=links,
    )
    expected = step_path(mode, m, forward, recompute, backward, copies, [skip] if skip else [])
    assert found == [expected] * 2


@pytest.mark.parametrize("mode", ONE_MODE)
@pytest.mark.parametrize(("n", "m"), some([(3, 4), (4, 8), (8, 16)], [(3, 4), (8, 8)]))
def test_a_skip_past_all_partitions_takes_no_time(devices, n, m, mode):
    model = wrap(
        [Stashing(), *[Stage() for _ in range(n - 2)], Popping()], devices[:n], mode, chunks=m
    )
    for seed in SEEDS[::2]:
        found = makespans(model, seed=seed, requires_grad=bool(seed % 4))
        assert found == [limit(mode, n, m)] * 2, f"jitter {seed}"


@pytest.mark.parametrize("mode", ONE_MODE)
def test_a_skip_that_arrives_just_in_time_takes_no_time(devices, mode):
    # 2 rows of 20 numbers of 4 bytes, in the time of two forwards.
    links = {(0, 3): 80, (3, 0): 80}
    model = wrap([Stashing(), Stage(), Stage(), Popping()], devices[:4], mode, 8)
    for seed in range(some(3, 1) * len(SEEDS)):
        found = makespans(model, seed=seed, bandwidth=links)
        assert found == [limit(mode, 4, 8)] * 2, f"jitter {seed}"


def test_inference_takes_the_time_of_the_forwards(devices):
    model = wrap([Stage() for _ in range(4)], devices[:4], chunks=8)
    x = torch.rand(16, 4, device=devices[0])
    with observe(jitter=0) as seen, torch.inference_mode():
        model(x)
    assert seen.makespan == 8 + 4 - 1
    assert_no_races(seen)
