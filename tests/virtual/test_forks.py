"""Forked children: accelerators compute there, and backward raises an error that says why."""

import copy
import os
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.forks import WIDTH, ChildError, Pausing, forward, in_child, layers, step
from tests.support.helpers import MODES
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


@pytest.mark.parametrize("mode", MODES)
def test_wrapper_in_a_child(wrap, mode):
    model = wrap(layers(), checkpoint=mode)
    use = partial(forward, model, model.devices[0])
    for _ in range(2):
        assert in_child(use) == use()


@pytest.mark.parametrize("mode", MODES)
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


def test_loader_with_forked_workers_beside_a_wrapper(wrap):
    module = layers()
    # One, as these tests run on one core.
    options = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": 30}
    losses = []
    for given in ({}, options):
        model = wrap(copy.deepcopy(module))
        losses.append([])
        for x in DataLoader(torch.ones(16, WIDTH).cumsum(0) / 16, batch_size=8, **given):
            loss = model(x.to(model.devices[0])).square().sum()
            loss.backward()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
