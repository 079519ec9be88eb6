"""Wrappers on accelerators keep the promises about devices."""

import pytest

from tests.contract.promises import PROMISES, keeps
from tests.contract.test_contract import LOCAL, cases
from tests.contract.wrapped import Maker
from tests.support.helpers import assert_no_races
from tests.support.size import some
from torchgpipe.testing import observe

OF_DEVICES = {name for name, promise in PROMISES.items() if promise.devices}


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "run", "mode"),
    # Every eighth one without a soak, so that each second promise takes one of the wrappers.
    [x for x in cases(LOCAL) if x.values[0] in OF_DEVICES][:: some(1, 8)],
)
def test_promise(name, run, mode, devices):
    if name.startswith("memory:"):
        # Jitter makes wrappers try workers, which stay.
        keeps(name, Maker(run, mode, devices[:2]))
        return
    with observe(jitter=0) as seen:
        keeps(name, Maker(run, mode, devices[:2]))
    assert_no_races(seen)


@pytest.mark.parametrize("k", some([[0, "cpu"], [0, 0]], [[0, "cpu"]]))
def test_beside_the_cpu_and_on_one_device_twice(k, devices):
    places = [x if x == "cpu" else devices[x] for x in k]
    for name in ("memory:loop", "errors:anywhere"):
        keeps(name, Maker("GPipe", "always", places))


EAGER = [run for run in LOCAL if "graphs" not in run]


@pytest.mark.full
@pytest.mark.parametrize("run", EAGER)
def test_notes_of_partitions_that_share_a_device(run, devices):
    # They compute in the caller's thread, which puts back its settings when a cell fails.
    keeps("errors:layers", Maker(run, "always", [devices[0]] * 2))


LEAVING = [(run, mode) for run in EAGER for mode in ("offload", "share", "policy")]
#: Each promise with one run and one mode, by turns; all of them in a soak.
OF_CELLS = [
    (name, *case)
    for number, name in enumerate(sorted(x for x in OF_DEVICES if PROMISES[x].modes))
    for case in some(LEAVING, [LEAVING[number % len(LEAVING)]])
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "run", "mode"), OF_CELLS[:: some(1, 14)])
def test_promise_of_cells_that_leave(name, run, mode, devices, monkeypatch):
    # Tensors of promises are small, and micro-batches are few.
    monkeypatch.setattr("torchgpipe.recompute.storage.LEAST", 1)
    monkeypatch.setattr("torchgpipe.schedule.trips.BETWEEN", 0)
    if name.startswith("memory:"):
        keeps(name, Maker(run, mode, devices[:2]))
        return
    with observe(jitter=0) as seen:
        keeps(name, Maker(run, mode, devices[:2]))
    assert_no_races(seen)
