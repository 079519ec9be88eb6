"""Plans on virtual accelerators: exact times, honest memory, and nothing by hand that is better."""

import copy
import importlib
import itertools
import pickle
import random
import re
from functools import partial
from itertools import pairwise
from math import inf

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import (
    Timed,
    by_hand,
    links,
    random_layers,
    run,
    skipping_layers,
    unet,
)
from tests.support.size import SOAK
from torchgpipe import GPipe, ScheduledLoss, plan, trace
from torchgpipe.planner.layers import measured, measured_links
from torchgpipe.planner.problem import problem_of
from torchgpipe.planner.search import Search, search
from torchgpipe.planner.trial import settings
from torchgpipe.testing import observe

#: The module, which has the name of its function in the package.
module = importlib.import_module("torchgpipe.plans")

CHUNKS = [1, 2, 4, 8, 16]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Measure once: virtual time does not vary."""
    monkeypatch.setattr("torchgpipe.planner.auto.problem_of", partial(problem_of, timeout=0))


@pytest.fixture
def one_by_one(issuing, monkeypatch):
    """Have the caller issue: the order of threads, and so their memory, is up to the host."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)


def random_case(seed, devices):
    """Layers, input, target and the arguments of a plan."""
    draw = random.Random(seed)
    workers, count = draw.choice([2, 3, 4]), draw.choice([5, 6, 7])
    width, rows = draw.choice([64, 128, 256]), draw.choice([256, 512, 1024])
    layers = random_layers(seed, count, width)
    x, y = torch.rand(rows, width), torch.rand(rows, width)
    options = {"devices": devices[:workers], "timeout": 0, "chunks": CHUNKS}
    if seed % 4:
        options |= {"loss": F.mse_loss, "targets": (y,)}
    return layers, x, y, options, draw.uniform(0.7, 1.0)


def planned(layers, x, options, **more):
    with observe(bandwidth=links(range(8))):
        return plan(layers, x, **options, **more)


def limited(layers, x, options, share):
    """Plan under a share of the memory that the fastest plan takes.

    Returns:
        The plans, the limit, and the problem that was searched.
    """
    problems, found = [], {}

    def once(layers, *sizes, **more):
        """Measure what both plans begin with once: virtual time does not vary."""
        key = tuple(map(tuple, sizes[:2])), sizes[2]
        if key not in found:
            found[key] = measured(layers, *sizes, **more)
        return [*found[key]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "search", lambda *a: problems.append(a[0]) or search(*a))
        patch.setattr("torchgpipe.planner.problem.measured", once)
        limit = share * max(planned(layers, x, options).best.memory.values())
        return planned(layers, x, options, memory=limit), limit, problems[-1]


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
@pytest.mark.parametrize("seed", range(40) if SOAK else [8])
def test_prediction_is_what_is_measured(devices, seed):
    layers, x, y, options, share = random_case(seed, devices)
    plans, limit, _ = limited(layers, x, options, share)
    if not plans.candidates:
        with pytest.raises(ValueError, match="too much by"):
            assert plans.best
        return
    best = plans.best
    time, memory = run(best.wrap, layers, x, y, options["devices"])
    assert best.time == pytest.approx(time)
    # Under autograd, threads run backward, and the host's timing decides which one is ahead.
    error = 0.06 if best.schedule is None else 0.02
    assert max(best.memory.values()) == pytest.approx(max(memory.values()), rel=error)
    assert max(memory.values()) <= limit


def skipping_case(kind, seed, devices):
    """Layers with skips, input, target and the arguments of a plan."""
    draw = random.Random(seed)
    workers = draw.choice([2, 3, 4])
    if kind == "linear":
        width, rows = draw.choice([64, 128, 256]), draw.choice([256, 512])
        layers, shape = skipping_layers(seed, draw.choice([6, 7, 8]), width), (rows, width)
    else:
        layers, shape = unet(seed, draw.choice([8, 16])), (draw.choice([32, 64]), 3, 16, 16)
    x, y = torch.rand(shape), torch.rand(shape)
    options = {"devices": devices[:workers], "timeout": 0, "chunks": [2, 4, 8]}
    if seed % 3:
        options |= {"loss": F.mse_loss, "targets": (y,)}
    return layers, x, y, options, draw.uniform(0.6, 1.0)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
@pytest.mark.parametrize("kind", ["linear", "convolutions"] if SOAK else ["linear"])
@pytest.mark.parametrize("seed", range(24) if SOAK else [5])
def test_prediction_with_skips(devices, kind, seed):
    """Memory of skips where they wait, and the time of their copies, are part of a plan."""
    layers, x, y, options, share = skipping_case(kind, seed, devices)
    plans, limit, _ = limited(layers, x, options, share)
    if not plans.candidates:
        return
    best = plans.best
    time, memory = run(best.wrap, layers, x, y, options["devices"])
    assert best.time == pytest.approx(time)
    assert max(best.memory.values()) == pytest.approx(max(memory.values()), rel=0.07)
    assert max(memory.values()) <= limit


def sizes_and_settings(problem, devices, n):
    """Each setting with each balance of ``n`` layers."""
    for setting in settings(problem, CHUNKS):
        count = len(setting.schedule.placement)
        for cuts in itertools.combinations(range(1, n), count - 1):
            yield setting, tuple([b - a for a, b in pairwise((0, *cuts, n))])


@pytest.mark.skipif(not SOAK, reason="thousands of simulations")
@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
@pytest.mark.parametrize("seed", range(20))
def test_nothing_by_hand_is_better_without_limits(devices, seed, monkeypatch):
    layers, x, _, options, _ = random_case(seed, devices)
    problems = []
    monkeypatch.setattr(module, "search", lambda *a: problems.append(a[0]) or search(*a))
    best = planned(layers, x, options).best
    (problem,) = problems
    found, n = Search(problem), len(layers)
    for setting, sizes in sizes_and_settings(problem, options["devices"], n):
        never = ("never",) * len(sizes)
        assert found.trial(setting, sizes, never).time > 0.97 * best.time


def faster(problem, devices, n, time, memory):
    """Yield trials by hand that take less than a time and a memory, as simulated."""
    found = Search(problem)
    for setting, sizes in sizes_and_settings(problem, devices, n):
        if found.fastest(setting, sizes) >= time:
            continue
        for modes in itertools.product(["never", "except_last", "always"], repeat=len(sizes)):
            trial = found.trial(setting, sizes, modes)
            if trial.time < time and max(trial.memory) < memory:
                yield trial


@pytest.mark.skipif(not SOAK, reason="thousands of simulations")
@pytest.mark.usefixtures("one_by_one")
@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
@pytest.mark.parametrize("seed", range(27))
def test_nothing_by_hand_is_better_under_limits(devices, seed):
    """Nothing that a schedule runs in the memory is faster.

    Whatever seems to be faster, and to need less than a tenth too much, is run.
    """
    layers, x, y, options, share = random_case(seed, devices)
    plans, limit, problem = limited(layers, x, options, share)
    time = 0.97 * plans.best.time if plans.candidates else inf
    for trial in faster(problem, options["devices"], len(layers), time, 1.1 * limit):
        places = [options["devices"][w] for w in trial.schedule.placement]
        hand = by_hand(
            [*trial.balance], places, trial.schedule.chunks, [*trial.modes], trial.setting.name
        )
        took, memory = run(hand, layers, x, y, options["devices"])
        assert took > time or max(memory.values()) > limit, trial


@pytest.fixture(scope="module")
def case(devices):
    """Layers, input, target, and the arguments of plans, and these plans."""
    layers, x, y, options, _ = random_case(9, devices)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpipe.planner.auto.problem_of", partial(problem_of, timeout=0))
        return layers, x, y, options, planned(layers, x, options)


def test_wrapped(case):
    layers, x, y, options, plans = copy.deepcopy(case)
    best = plans.best
    # A module without layers is false.
    other = nn.Sequential()
    assert best.wrap(copy.deepcopy(layers), other).loss is other
    training = best.wrap(layers)
    assert isinstance(training, ScheduledLoss)
    assert training.model.balance == best.balance
    assert training.model.devices == best.devices
    places = best.devices[0], best.devices[-1]
    training(x.to(places[0]), y.to(places[1])).backward()
    text = str(plans)
    assert text.splitlines()[1].startswith(best.schedule)
    assert re.fullmatch(rf"{best.schedule}, balance=.*: [\d.]+ ms a step, .* bubble .*%", str(best))
    assert "and" in text.splitlines()[-1]
    without = planned(layers, x, {"devices": options["devices"], "timeout": 0, "chunks": [4]})
    assert isinstance(without.best.wrap(layers), GPipe)
    assert without.best.schedule is None
    assert 0 < without.best.bubble < 1


def test_plans_can_be_pickled(case):
    layers, x, y, _, plans = copy.deepcopy(case)
    found = pickle.loads(pickle.dumps(plans)).best
    model = found.wrap(layers)
    places = found.devices[0], found.devices[-1]
    with observe(bandwidth=links(range(8))), trace(model) as timeline:
        model(x.to(places[0]), y.to(places[1])).backward()
    assert timeline.step().makespan == pytest.approx(plans.best.time)


def test_what_does_not_fit_is_computed_again(devices):
    """The fullest partitions alone are computed again, so the step takes as little as can be."""
    layers = nn.Sequential()
    for _ in range(6):
        layers.append(Timed(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), (0.01,) * 3))
    x, y = torch.rand(2048, 64), torch.rand(2048, 64)
    options = {"devices": devices[:3], "timeout": 0, "chunks": [8]}
    options |= {"loss": F.mse_loss, "targets": (y,)}
    free = planned(layers, x, options).candidates
    one = next(c for c in free if c.schedule == "one_f_one_b")
    tight = planned(layers, x, options, memory=0.8 * max(one.memory.values()))
    again = [c for c in tight.candidates if not isinstance(c.checkpoint, str)]
    assert again
    assert all("never" in c.checkpoint for c in again)


def test_links(devices):
    with observe(bandwidth={(0, 1): 2e6, (1, 0): 1e6}):
        found = measured_links(devices[:2])
    assert found[devices[0], devices[1]].at(4e6) == pytest.approx(2)
    assert found[devices[1], devices[0]].at(4e6) == pytest.approx(4)


def test_layers_without_a_time(devices):
    with pytest.raises(ValueError, match=r"layers must take time.*\['cpu'\] \* 1$"):
        plan(nn.Sequential(nn.Linear(2, 2)), torch.rand(4, 2), devices=devices[:1], timeout=0)
    with pytest.raises(TypeError, match=r"a sample is.*pass.*\(argument,\)"):
        plan(nn.Sequential(nn.Linear(2, 2)), [torch.rand(4, 2)], devices=devices[:1])
    with pytest.raises(ValueError, match="batch: 0"):
        plan(nn.Sequential(nn.Linear(2, 2)), torch.rand(4, 2), devices=devices[:1], batch=0)


@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
def test_by_hand_is_what_the_search_has_simulated(devices):
    layers, x, y, options, _ = random_case(23, devices)
    candidate = planned(layers, x, options).candidates[3]
    hand = by_hand(
        candidate.balance,
        candidate.devices,
        candidate.chunks,
        candidate.checkpoint,
        candidate.schedule,
    )
    time, _ = run(hand, layers, x, y, options["devices"])
    assert candidate.time == pytest.approx(time)


@pytest.mark.parametrize("auto", [False, True])
def test_prediction_beside_measurement(devices, auto):
    """A table of the model has both, after a trace."""
    layers, x, y, options, _ = random_case(9, devices)
    with observe(bandwidth=links(range(8))):
        if auto:
            own = {"devices": options["devices"], "chunks": 4}
            model = GPipe(layers, "auto", sample=x, **own)
        else:
            model = plan(layers, x, **options).best.wrap(layers)
    gpipe = model if auto else model.model
    found = model.describe()
    assert found.measured is None
    assert found.predicted > 0
    x, y = x.to(gpipe.devices[0]), y.to(gpipe.devices[-1])
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters())
        with observe(bandwidth=links(range(8))), trace(model):
            loss = F.mse_loss(model(x), y) if auto else model(x, y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del loss
    found = model.describe()
    assert found.measured == pytest.approx(found.predicted)
    for row in found.rows:
        assert row.planned > 0
        assert row.memory > 0
    assert str(found).splitlines()[-1].startswith("step: ")
    assert "predicted" in str(found).splitlines()[-1]
    gpipe.chunks += 1
    assert model.describe().predicted is None


@pytest.mark.filterwarnings("ignore:GPipe trains without pipelining")
@pytest.mark.parametrize("seed", range(20) if SOAK else [2])
def test_auto_finds_the_optimum_of_planted_costs(devices, seed):
    """No balance is faster, under the chunks and modes that are given."""
    draw = random.Random(seed)
    count, workers, m = draw.choice([5, 6, 7]), draw.choice([2, 3, 4]), draw.choice([4, 8])
    mode = draw.choice(["always", "never"])
    layers = nn.Sequential()
    for _ in range(count):
        costs = [draw.uniform(0.001, 0.02) for _ in range(3)]
        layers.append(Timed(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), costs))
    x, y = torch.rand(64, 64), torch.rand(64, 64)
    options = {"devices": devices[:workers], "chunks": m, "checkpoint": mode}
    wraps = []

    def auto(copied):
        with observe(bandwidth=links(range(8))):
            wraps.append(GPipe(copied, "auto", sample=x, **options))
        return wraps[0]

    time, _ = run(auto, layers, x, y, options["devices"])
    assert (wraps[0].chunks, wraps[0].checkpoint) == (m, mode)
    for cuts in itertools.combinations(range(1, count), workers - 1):
        sizes = [b - a for a, b in pairwise((0, *cuts, count))]
        if sizes != wraps[0].balance:
            hand = by_hand(sizes, options["devices"], m, mode, None)
            other, _ = run(hand, layers, x, y, options["devices"])
            assert other > 0.999 * time
