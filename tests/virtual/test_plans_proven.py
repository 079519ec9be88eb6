"""Plans that are proven by steps: figures beside predictions, and the best of what was run."""

import copy
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import links, random_layers
from tests.support.size import some
from torchgpipe import plan
from torchgpipe.planner.search import search
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

proof = import_module("torchgpipe.planner.proving")
ROWS, WIDTH = 512, 64


def planned(devices, loss=F.mse_loss, rows=ROWS, **options):
    x, y = torch.rand(2, rows, WIDTH)
    layers = nn.Sequential(*random_layers(3, 5, WIDTH), nn.Dropout(0.1))
    before = copy.deepcopy(layers.state_dict())
    states = [torch.get_rng_state(), torch.get_device_module("virtual").get_rng_state(0)]
    options = {"devices": devices[:2], "chunks": [4], "timeout": 0, **options}
    with observe(bandwidth=links(range(8), host=1e3)):
        found = plan(layers, x, loss=loss, targets=(y,) if loss else (), **options)
    torch.testing.assert_close(layers.state_dict(), before, rtol=0, atol=0)
    now = [torch.get_rng_state(), torch.get_device_module("virtual").get_rng_state(0)]
    assert all(map(torch.equal, states, now))
    return found


@pytest.mark.parametrize("loss", some([F.mse_loss, None], [None]))
def test_proofs_stand_beside_predictions(devices, issuing, loss, monkeypatch):
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)
    found = planned(devices, loss, prove=1)
    best = found.best
    assert best.proof.time == pytest.approx(best.time)
    assert 0.96 < max(best.memory.values()) / max(best.proof.memory.values()) < 1.5
    assert all(x.proof is None for x in found.candidates[1:])
    assert str(found).splitlines()[0].split()[4:8] == ["ms", "proven", "MiB", "proven"]
    assert str(best).endswith(f"proven: {best.proof.time:.4g} ms")
    assert "proven" not in str(planned(devices, loss, prove=0))


@pytest.fixture(scope="module")
def best(devices):
    """The best plan without a proof."""
    return planned(devices, prove=0).best


def test_what_was_run_decides(devices, best, monkeypatch):
    """The fastest by prediction is slow here, and the next ones are run until one is fast."""

    def wrong(problem, chunks, limits):
        found = search(problem, chunks, limits)
        slowest = max(found, key=lambda x: x.time)
        vars(slowest)["time"] = 1e-3
        return [slowest, *(x for x in found if x is not slowest)]

    monkeypatch.setattr(proof, "search", wrong)
    assert planned(devices, prove=0).best.schedule != best.schedule
    found = planned(devices, prove=5)
    assert found.best.proof.time == pytest.approx(best.time)
    # One that nobody has to run was not.
    assert sum(x.proof is not None for x in found.candidates) == 2


def test_what_is_proven_may_fill_the_memory(devices, best):
    """A limit that the fastest candidate just fits has no margin for it, but for a proof."""
    limit = 1.005 * max(best.memory.values())
    assert planned(devices, memory=limit, prove=0).best.time > best.time
    proven = planned(devices, memory=limit, prove=3).best
    assert proven.time == pytest.approx(best.time)
    assert max(proven.proof.memory.values()) <= limit


@pytest.mark.usefixtures("issuing")
def test_what_steps_have_taken_corrects_the_memory(devices, monkeypatch):
    """A step takes less than predicted, so with that much memory it is found all the same."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)
    free = planned(devices, prove=1).best
    used, predicted = (max(x.values()) for x in (free.proof.memory, free.memory))
    assert used < predicted
    limit = (used + predicted) / 2
    assert all(x.time > free.time for x in planned(devices, memory=limit, prove=0).candidates)
    found = planned(devices, memory=limit, prove=2).best
    assert found.proof.time == pytest.approx(free.time)
    assert max(found.proof.memory.values()) <= limit


def test_what_has_too_little_memory_is_no_candidate(devices, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(proof, "_step", full)
    found = planned(devices, prove=2, memory="1GiB")
    assert all(x.proof is None for x in found.candidates)
    assert {x.proof.time for x in found.misfits if x.proof} == {float("inf")}


def test_wrong_arguments(devices):
    with pytest.raises(ValueError, match=r"that has the rows .*\(rows: 8\); pass a sample of 512"):
        planned(devices, rows=8, batch=ROWS, prove=1)
    with pytest.raises(ValueError, match=r"prove: -1\); pass such as 3"):
        planned(devices, prove=-1)
