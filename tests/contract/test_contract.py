"""Every wrapper keeps every promise, or says what it does instead."""

import pytest

from tests.contract import across
from tests.contract.page import PAGE, written
from tests.contract.promises import GRAPHS, PROMISES, keeps
from tests.contract.wrapped import RUNS, Maker, modes_of
from tests.distributed.processes import Processes
from tests.support.size import SOAK, some

LOCAL = [run for run in RUNS if run != "Pipe"]


def cases(runs):
    """The promises with each run, and with each mode where that matters.

    Of two schedules a promise takes one, and of the modes, by turns. One of eight promises takes
    graphs, which take long to trace, and so do those that graphs keep otherwise. A soak takes all.
    """
    found = []
    for number, (name, promise) in enumerate(PROMISES.items()):
        other = "1f1b" if number % 2 else "zbh1"
        graphs = number % 8 == 0 or promise.eager or GRAPHS in promise.otherwise
        for k, run in enumerate(runs):
            if not SOAK and run.startswith(f"ScheduledLoss {other}"):
                continue
            if not (SOAK or graphs) and run.endswith("graphs"):
                continue
            # Every mode is taken with every run.
            all_modes = modes_of(run)
            few = [all_modes[(number + k) % len(all_modes)]] if promise.modes else ["except_last"]
            modes = some(all_modes if promise.modes else few, few)
            found += [pytest.param(name, run, mode, id=f"{name}-{run}-{mode}") for mode in modes]
    return found


@pytest.fixture(scope="module")
def processes():
    found = Processes(2)
    yield found
    found.stop()


@pytest.mark.full
@pytest.mark.parametrize(("name", "run", "mode"), cases(LOCAL))
def test_promise(name, run, mode):
    keeps(name, Maker(run, mode))


@pytest.mark.full
# A third of them without a soak: each takes as long as ten others, and tests/distributed has more.
@pytest.mark.parametrize(("name", "run", "mode"), cases(["Pipe"])[:: some(1, 4)])
def test_promise_across_processes(name, run, mode, processes):
    processes.run(across.check, 2, name, run, mode)
    if PROMISES[name].fails_under(mode):
        processes.stop()


def test_page():
    assert PAGE.read_text("utf-8") == written(), "run python -m tests.contract.page"
