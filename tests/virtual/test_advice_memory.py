"""Advice on models that were planned: nothing is proposed that does not fit into the memory."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import Timed, links
from torchgpipe import GPipe, ScheduledLoss, plan, trace
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

ROWS, WIDTH, CHUNKS = 256, 64, 8


def layers_of(count=4):
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            Timed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), (0.1,) * 3)
            for _ in range(count)
        ]
    )


def planned(devices, memory=None):
    """The layers, and a plan of them for two devices."""
    layers, x, y = layers_of(), torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
    options = {"loss": F.mse_loss, "targets": (y,)}
    # Nothing leaves for the host.
    with observe(bandwidth=links(devices, host=1e3)):
        found = plan(
            layers, x, devices=devices[:2], memory=memory, chunks=[CHUNKS], timeout=0, **options
        )
    return layers, found


def advised(model, devices):
    """The advice on a step, and the memory that the step has taken."""
    x, y = torch.rand(ROWS, WIDTH, device=devices[0]), torch.rand(ROWS, WIDTH, device=devices[1])
    for _ in range(2):
        with observe(bandwidth=links(devices)), trace(model) as timeline:
            model(x, y).backward()
    return timeline.advice


def test_nothing_is_proposed_that_does_not_fit(devices):
    layers, free = planned(devices)
    never = next(x for x in free.candidates if x.schedule == "fill_drain")
    limit = 0.8 * max(never.memory.values())
    _, plans = planned(devices, limit)
    tight = next(x for x in plans.candidates if x.schedule == never.schedule)
    assert tight.checkpoint != "never"
    # Of the same settings, a wrapper by hand knows no limit.
    by_hand = GPipe(
        copy.deepcopy(layers),
        tight.balance,
        devices=tight.devices,
        chunks=tight.chunks,
        checkpoint=tight.checkpoint,
    )
    told = advised(ScheduledLoss(by_hand, F.mse_loss, tight.schedule), devices)
    assert told.change == {"checkpoint": "never"}
    assert "more activations are kept" in told.caution
    advice = advised(tight.wrap(copy.deepcopy(layers)), devices)
    assert advice is None or advice.change != told.change
    # With a limit that leaves room, there is nothing to be cautious of.
    _, plans = planned(devices, 4 * limit)
    roomy = next(x for x in plans.candidates if x.schedule == never.schedule)
    model = roomy.wrap(copy.deepcopy(layers))
    model.model.checkpoint = "always"
    advice = advised(model, devices)
    assert advice.change == told.change
    assert not advice.caution


def test_a_device_that_is_too_small(devices, monkeypatch):
    """Without a plan, what cells have kept tells what does not fit into the device."""
    # What earlier tests have left counts as in use while it is there.
    gc.collect()
    options = {"balance": [2, 2], "devices": devices[:2], "chunks": CHUNKS}

    def wrapped(mode):
        model = GPipe(layers_of(), checkpoint=mode, **options)
        return ScheduledLoss(model, F.mse_loss, "fill_drain")

    def limited(total):
        monkeypatch.setattr("torchgpipe.planner.replays.memory_total", lambda _: total)
        return advised(wrapped("always"), devices)

    advised(wrapped("never"), devices)
    needed = max(torch.accelerator.max_memory_allocated(x) for x in devices[:2])
    told = limited(1.2 * needed)
    assert told.change == {"checkpoint": "never"}
    assert "more activations are kept" in told.caution
    advice = limited(0.8 * needed)
    assert advice is None or advice.change != told.change
