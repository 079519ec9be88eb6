"""Plans on virtual accelerators: exact times, honest memory, and nothing by hand that is better."""

import copy
import itertools
import pickle
import random
import re
from functools import partial
from itertools import pairwise

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
)
from tests.support.size import SOAK
from torchgpipe import GPipe, ScheduledLoss, plan, trace
from torchgpipe.planner.layers import measured_links
from torchgpipe.planner.problem import Problem
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

CHUNKS = [1, 2, 4, 8, 16]


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Measure once: virtual time does not vary."""
    monkeypatch.setattr("torchgpipe.planner.auto.Problem", partial(Problem, timeout=0))


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


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.filterwarnings("ignore:GPipe leaves devices idle")
@pytest.mark.parametrize("seed", range(40) if SOAK else [8])
def test_prediction_is_what_is_measured(devices, seed):
    layers, x, y, options, share = random_case(seed, devices)
    limit = share * max(planned(layers, x, options).best.memory.values())
    plans = planned(layers, x, options, memory=limit)
    if not plans.candidates:
        with pytest.raises(ValueError, match="too much by"):
            assert plans.best
        return
    best = plans.best
    time, memory = run(best.wrap, layers, x, y, options["devices"])
    assert best.time == pytest.approx(time)
    # More is counted than a step takes, and hardly less.
    assert 0.96 < max(best.memory.values()) / max(memory.values()) < 1.5
    assert max(memory.values()) <= limit


@pytest.fixture(scope="module")
def case(devices):
    """Layers, input, target, and the arguments of plans, and these plans."""
    layers, x, y, options, _ = random_case(9, devices)
    options["chunks"] = [4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchgpipe.planner.auto.Problem", partial(Problem, timeout=0))
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
    assert re.fullmatch(
        rf"{best.schedule}, balance=.*: [\d.]+ ms a step, .* bubble .*%, .* ms", str(best)
    )
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


@pytest.mark.parametrize("auto", [False, True])
def test_prediction_beside_measurement(case, auto):
    """A table of the model has both, after a trace."""
    layers, x, y, options, plans = copy.deepcopy(case)
    with observe(bandwidth=links(range(8))):
        if auto:
            own = {"devices": options["devices"], "chunks": 4}
            model = GPipe(layers, "auto", sample=x, **own)
        else:
            model = plans.best.wrap(layers)
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


@pytest.mark.filterwarnings("ignore:GPipe leaves devices idle")
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
