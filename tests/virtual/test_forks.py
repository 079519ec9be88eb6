"""Forked children: accelerators compute there, and backward raises an error that says why."""

import os
from functools import partial

import pytest

from tests.support.forks import ChildError, Pausing, forward, in_child, layers, step
from tests.virtual.stages import ONE_MODE
from torchgpipe import GPipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]


@pytest.fixture(params=["caller", "workers"])
def wrap(request, devices, monkeypatch):
    """Wrap layers such that the caller issues the cells of most steps, or workers all."""
    monkeypatch.setattr(
        "torchgpipe.engine.workers.has_streams", lambda device: request.param == "caller"
    )
    return partial(GPipe, balance=[2, 2], chunks=2, devices=devices[:2])


@pytest.mark.parametrize("mode", ONE_MODE)
def test_wrapper_in_a_child(wrap, mode):
    model = wrap(layers(), checkpoint=mode)
    use = partial(forward, model, model.devices[0])
    for _ in range(2):
        assert in_child(use) == use()


@pytest.mark.parametrize("mode", ONE_MODE)
def test_backward_in_a_child(wrap, mode):
    """The threads of autograd, one for each accelerator, do not survive a fork."""
    model = wrap(layers(), checkpoint=mode)
    use = partial(step, model, model.devices[0])
    expected = use()
    with pytest.raises(ChildError, match="fork-based multiprocessing"):
        in_child(use)
    assert use() == expected


@pytest.mark.parametrize("when", ["forward", "recomputation"])
def test_child_forked_while_a_thread_is_in_a_step(wrap, when):
    """Nobody holds the thread's locks in the child."""
    pausing = Pausing(when)
    paused, other = wrap(layers(pausing), checkpoint="always"), wrap(layers())
    use = partial(forward, other, other.devices[0])
    expected = use()
    with pausing.within_a_step_of(paused, paused.devices[0]):
        assert in_child(use) == expected
    assert use() == expected
