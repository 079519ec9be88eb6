"""Schedules on virtual accelerators: right, without a race, and as fast as the simulator says."""

import copy
import threading
from collections import Counter
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.schedule.cases import examples, schedules
from tests.support.helpers import MODES, assert_no_races
from tests.support.schedules import CASES, NAMES, compare, schedule_for, workers_of
from tests.support.size import some
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.devices import pool
from torchgpipe.engine import outcome
from torchgpipe.testing import observe

#: Each case, with a schedule and a mode by turns.
BY_TURNS = [(case, NAMES[k % len(NAMES)], MODES[k % 3]) for k, case in enumerate(CASES)]


@pytest.mark.parametrize(("case", "name", "mode"), some([*product(CASES, NAMES, MODES)], BY_TURNS))
def test_gradients_and_buffers(devices, case, name, mode):
    torch.manual_seed(0)
    with observe(jitter=0) as seen:
        compare(CASES[case](), schedule_for(case, name), devices, mode)
    assert not seen.races


@pytest.mark.parametrize("name", NAMES[::2])
@pytest.mark.parametrize("case", ["functions of all kinds", "weights of two stages"])
def test_gradients_added_at_once(devices, monkeypatch, case, name):
    monkeypatch.setattr(outcome, "LARGE", 0)
    with observe(jitter=0) as seen:
        compare(CASES[case](), schedule_for(case, name), devices, "except_last")
    assert not seen.races


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        # Each weight once, since autograd adds up what comes from two uses in another order.
        self.one, self.other, self.dropout = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.4)

    def forward(self, x):
        return self.dropout(self.one(x)) + self.other(self.dropout(x))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_random_numbers_are_those_of_gpipe(devices, name, mode):
    """Dropout has the masks that it has under GPipe, and fill-drain all bits of its gradients."""
    torch.manual_seed(0)
    where = [devices[w] for w in workers_of(name)]
    layers = nn.Sequential(*[Noisy() for _ in range(4)])
    model = GPipe(layers, [1] * 4, devices=where, chunks=4, checkpoint=mode)
    training = ScheduledLoss(model, F.mse_loss, name, outputs=True)
    x = torch.rand(8, 6, device=model.devices[0], requires_grad=True)
    y = torch.rand(8, 6, device=model.devices[-1])
    for _ in range(2):
        torch.manual_seed(1)
        output = model(x)
        F.mse_loss(output, y).backward()
        # Without the graph, whose nodes belong to the streams of GPipe's partitions.
        output = output.detach()
        after = torch.get_rng_state()
        expected = [tensor.grad for tensor in (*model.parameters(), x)]
        model.zero_grad()
        x.grad = None
        torch.manual_seed(1)
        loss, found = training(x, y)
        loss.backward()
        del loss
        assert torch.equal(found, output)
        assert torch.equal(after, torch.get_rng_state())
        for tensor, other in zip((*model.parameters(), x), expected):
            torch.testing.assert_close(tensor.grad, other)
            assert name != "fill_drain" or torch.equal(tensor.grad, other)
        model.zero_grad()
        x.grad = None


@examples
@given(schedules(), st.sampled_from(MODES))
def test_random_programs(devices, case, mode):
    """Any valid program gives the gradients of the micro-batches one after another."""
    schedule, _ = case
    n, m = len(schedule.placement), schedule.chunks
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3)) for _ in range(n)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    x, y = torch.rand(2 * m, 3), torch.rand(2 * m, 3)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    where = [devices[w] for w in schedule.placement]
    model = GPipe(nn.Sequential(*layers), [1] * n, devices=where, chunks=m, checkpoint=mode)
    training = ScheduledLoss(model, F.mse_loss, schedule)
    with observe(jitter=0) as seen:
        found = training(x.to(where[0]), y.to(where[-1]))
        found.backward()
    assert_no_races(seen)
    torch.testing.assert_close(found.cpu(), loss)
    for own, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


def test_a_schedule_and_its_model_have_one_set_of_streams_and_threads(devices, monkeypatch):
    made, new_stream = Counter(), pool.new_stream

    def counted(device):
        made[device] += 1
        return new_stream(device)

    monkeypatch.setattr(pool, "new_stream", counted)
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: False)
    before = {*threading.enumerate()}
    layers = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)])
    model = GPipe(layers, [1] * 3, devices=devices[:3], chunks=4)
    x, y = (torch.rand(8, 6, device=devices[k]) for k in (0, 2))
    for _ in range(2):
        ScheduledLoss(model, F.mse_loss, "1f1b")(x, y).backward()
        model(x).sum().backward()
    new = {*threading.enumerate()} - before
    assert len([x for x in new if x.name.startswith("torchgpipe")]) == 3
    assert len(made) == 3
    assert max(made.values()) <= pool.StreamPool.POOL
