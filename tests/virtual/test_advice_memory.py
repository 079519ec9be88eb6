"""Advice on models that were planned: nothing is proposed that does not fit into the memory."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import Timed, links
from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss, plan, trace
from torchgpipe.testing import observe

ROWS, WIDTH, CHUNKS = 256, 64, 8


def layers_of(count=4):
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            Timed(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), (0.1,) * 3)
            for _ in range(count)
        ]
    )


def planned(devices, memory=None, loss=F.mse_loss):
    """The layers, and a plan of them for two devices."""
    layers, x, y = layers_of(), torch.rand(ROWS, WIDTH), torch.rand(ROWS, WIDTH)
    options = {} if loss is None else {"loss": loss, "targets": (y,)}
    # Nothing leaves for the host.
    with observe(bandwidth=links(devices, host=1e3)):
        found = plan(
            layers, x, devices=devices[:2], memory=memory, chunks=[CHUNKS], timeout=0, **options
        )
    return layers, found


def advised(model, devices):
    """The advice on a step, and the memory that the step has taken."""
    x, y = torch.rand(ROWS, WIDTH, device=devices[0]), torch.rand(ROWS, WIDTH, device=devices[1])
    inside = isinstance(model, ScheduledLoss)
    for _ in range(2):
        with observe(bandwidth=links(devices)), trace(model) as timeline:
            (model(x, y) if inside else F.mse_loss(model(x), y)).backward()
    return timeline.advice


@pytest.mark.parametrize("loss", some([None, F.mse_loss], [F.mse_loss]))
def test_nothing_is_proposed_that_does_not_fit(devices, loss):
    layers, free = planned(devices, loss=loss)
    never = next(x for x in free.candidates if x.schedule in (None, "fill_drain"))
    limit = 0.8 * max(never.memory.values())
    _, plans = planned(devices, limit, loss)
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
    if loss is not None:
        by_hand = ScheduledLoss(by_hand, loss, tight.schedule)
    told = advised(by_hand, devices)
    assert told.change == {"checkpoint": "never"}
    assert "more activations are kept" in told.caution
    advice = advised(tight.wrap(copy.deepcopy(layers)), devices)
    assert advice is None or advice.change != told.change
    # With a limit that leaves room, there is nothing to be cautious of.
    _, plans = planned(devices, 4 * limit, loss)
    roomy = next(x for x in plans.candidates if x.schedule == never.schedule)
    model = roomy.wrap(copy.deepcopy(layers))
    (model if loss is None else model.model).checkpoint = "always"
    advice = advised(model, devices)
    assert advice.change == told.change
    assert not advice.caution


def test_a_plan_of_something_else_knows_nothing(devices):
    layers, plans = planned(devices, loss=None)
    model = plans.best.wrap(layers)
    model.checkpoint = "always"
    advice = advised(ScheduledLoss(model, F.mse_loss, "1f1b"), devices)
    assert "more activations are kept" in advice.caution
    # What belongs to the plan is not copied.
    assert copy.deepcopy(model)._stages.room is None


@pytest.mark.parametrize("loss", some([None, F.mse_loss], [F.mse_loss]))
def test_a_device_that_is_too_small(devices, loss, monkeypatch):
    """Without a plan, what cells have kept tells what does not fit into the device."""
    # What earlier tests have left counts as in use while it is there.
    gc.collect()
    options = {"balance": [2, 2], "devices": devices[:2], "chunks": CHUNKS}

    def wrapped(mode):
        model = GPipe(layers_of(), checkpoint=mode, **options)
        return model if loss is None else ScheduledLoss(model, loss, "fill_drain")

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
