"""Cells are freed at the instruction where the simulator says so, counted by the allocator."""

import gc

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, Scale, assert_no_races, wrap
from tests.support.schedules import workers_of
from tests.support.size import SOAK
from tests.virtual.stages import squares
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.schedule import Costs, one_f_one_b, simulate
from torchgpipe.testing import observe

ROWS, WIDTH, LAYERS = 4, 256, 24
#: The bytes of one activation.
UNIT = ROWS * WIDTH * 4
#: What a worker has besides: the tensors of one layer, what is on its way, sums of gradients.
BESIDES = 6

NAMES = ("fill_drain", "1f1b", "zbh1", "zbh2", "zbv")
NAMES += ("v_half", "v_min", "interleaved", "dualpipe_v") if SOAK else ()


def peaks(training, devices):
    model = training.model
    x = torch.rand(ROWS * model.chunks, WIDTH, device=model.devices[0], requires_grad=True)
    y = torch.rand(ROWS * model.chunks, WIDTH, device=model.devices[-1])
    training(x, y).backward()
    model.zero_grad()
    x.grad = None
    gc.collect()
    before = [torch.accelerator.memory_allocated(device) for device in devices]
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    with observe() as seen:
        loss = training(x, y)
        most = [torch.accelerator.max_memory_allocated(device) for device in devices]
        after = [torch.accelerator.memory_allocated(device) for device in devices]
        loss.backward()
    assert_no_races(seen)
    units = [(peak - old) / UNIT for peak, old in zip(most, before)]
    left = [(now - old) / UNIT for now, old in zip(after, before)]
    return units, left


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_peak(devices, name, mode):
    workers = workers_of(name)
    m = 8
    layers = [nn.Sequential(Scale(), *[nn.Tanh()] * (LAYERS - 1)) for _ in workers]
    model = wrap(layers, [devices[w] for w in workers], mode, m)
    training = ScheduledLoss(model, squares, name)
    found, left = peaks(training, devices[: max(workers) + 1])
    plan = training._plan(m, forward=False)
    # The caller has the input of the first stage. W needs the input, and the gradient that came.
    inputs = [0, 1, 1, 1]
    kept, pending = [x + LAYERS - 1 for x in inputs], [x + 1 for x in inputs]
    costs = Costs(activation=kept, pending=pending, checkpoint=inputs)
    expected = simulate(plan.schedule, costs).peak
    # The gradients of the input, and what the loss saves.
    more = {workers[0]: m, workers[-1]: m}
    for w, (own, other) in enumerate(zip(found, expected)):
        assert other <= own <= other + BESIDES + more.get(w, 0)
    # Sums of gradients, and the gradient of the input on the first device.
    assert max(left) <= m + 1


def test_what_arrives_is_let_go_of(devices):
    """Input that no layer keeps goes at its last use, though a gradient of it is wanted."""
    m = 8
    layers = [nn.Sequential(Scale(), nn.Tanh()), nn.Tanh()]
    model = GPipe(nn.Sequential(*layers), [1, 1], devices=devices[:2], chunks=m, checkpoint="never")
    found, _ = peaks(ScheduledLoss(model, squares, "fill_drain"), devices[:2])
    # The output, and the difference that the loss keeps, but not the input.
    assert 2 * m <= found[1] <= 2 * m + BESIDES


@pytest.mark.parametrize("schedule", ["1f1b", one_f_one_b(2, 2).pair()])
def test_large_gradients_do_not_wait_for_each_other(devices, schedule):
    size, count = 256, 8
    layers = [
        nn.Sequential(*[nn.Linear(size, size, bias=False) for _ in range(count)]) for _ in range(2)
    ]
    model = GPipe(nn.Sequential(*layers), [1, 1], devices=devices[:2], chunks=4)
    training = ScheduledLoss(model, squares, schedule)
    x = torch.rand(4, size, device=devices[0])
    y = torch.rand(4, size, device=devices[1])
    for _ in range(2):
        gc.collect()
        before = torch.accelerator.memory_allocated(devices[1])
        torch.accelerator.reset_peak_memory_stats(devices[1])
        training(x, y)
        peak = torch.accelerator.max_memory_allocated(devices[1]) - before
        # The sums, one gradient, and its first sum; activations are small.
        assert peak / (size * size * 4) < count + 2.5
