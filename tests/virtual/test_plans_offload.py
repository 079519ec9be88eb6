"""Plans of cells that leave for the memory of the host: times, peaks, and what is chosen."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import Timed, by_hand, links, run
from tests.support.size import SOAK, some
from torchgpipe import Offload, plan
from torchgpipe.partition.keeping import offload_of
from torchgpipe.planner.problem import problem_of
from torchgpipe.planner.search import Search
from torchgpipe.planner.trial import settings
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

(WIDTH, ROWS), N = some((256, 1024), (64, 256)), 4
#: The bytes of a millisecond between devices.
SPEED = 4 * WIDTH * ROWS
#: The milliseconds of a row: the whole mini-batch takes the same, however large it is.
TIMES = [x / ROWS for x in (5, 6, 4)]


@pytest.fixture(autouse=True)
def one_by_one(issuing, monkeypatch):
    """Have the caller issue: the order of threads, and so their memory, is up to the host."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)


def layers():
    torch.manual_seed(0)
    kinds = [
        lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    ]
    return nn.Sequential(*[Timed(kinds[k % 2](), TIMES) for k in range(8)])


@pytest.fixture(scope="module", params=some([SPEED, 0.3 * SPEED], [SPEED]))
def problems(devices, request):
    x, y = torch.rand(2, ROWS, WIDTH)
    found = {}
    with observe(bandwidth=links(range(8), SPEED, request.param)):
        for loss in some((None, F.mse_loss), (F.mse_loss,)):
            targets = () if loss is None else (y,)
            options = {"loss": loss, "targets": targets, "timeout": 0}
            found[loss] = problem_of(layers(), x, devices[:N], ROWS, **options)
    return found, x, y, request.param


CASES = [*product([None, "one_f_one_b", "interleaved"], ["offload", "mixed"])]


@pytest.mark.parametrize(
    ("name", "mode"), some(CASES, [("one_f_one_b", "mixed"), ("one_f_one_b", "offload")])
)
def test_predictions(devices, problems, name, mode):
    found, x, y, speed = problems
    problem = found[None if name is None else F.mse_loss]
    count = 2 * N if name == "interleaved" else N
    setting = next(
        s for s in settings(problem, [8]) if s.name == name and len(s.schedule.placement) == count
    )
    modes = (mode,) * count
    if mode == "mixed":
        modes = ("never", "offload", "always", "offload", *["except_last", Offload()] * 2)[:count]
    balance = (8 // count,) * count
    trial = Search(problem).trial(setting, balance, modes)
    places = [devices[w] for w in trial.schedule.placement]
    hand = by_hand([*balance], places, 8, [*modes], name)
    time, memory = run(hand, layers(), x, y, devices[:N], links(range(8), SPEED, speed))
    assert trial.time == pytest.approx(time, rel=0.03)
    for place, predicted in zip(devices, trial.memory):
        assert 0.97 * memory[place] <= predicted <= 1.35 * memory[place]


def plans_of(devices, speed, memory=None):
    x, y = torch.rand(2, ROWS, WIDTH)
    options = {"devices": devices[:2], "loss": F.mse_loss, "targets": (y,), "chunks": [8]}
    with observe(bandwidth=links(range(8), SPEED, speed)):
        return plan(layers(), x, memory=memory, timeout=0, **options), x, y


def test_what_does_not_fit_leaves_where_links_are_fast(devices):
    """Nothing is computed again for it, and a slow link is none."""
    limit = 0.45 * max(plans_of(devices, SPEED)[0].best.memory.values())
    plans, x, y = plans_of(devices, SPEED, limit)
    assert "offload" in str(plans)
    best = plans.best
    assert any(map(offload_of, best._trial.modes))
    assert sum(best.report.host) > 0
    time, memory = run(best.wrap, layers(), x, y, devices[:2], links(range(8), SPEED, SPEED))
    # Under looped_bfs one copy back begins later than simulated, by half a forward.
    assert best.time == pytest.approx(time, rel=0.04)
    assert max(memory.values()) < limit
    if SOAK:
        slow, _, _ = plans_of(devices, SPEED / 100, limit)
        assert not any(map(offload_of, slow.best._trial.modes))
        assert slow.best.time > best.time
