"""Memory of plans to the byte, and copies, where backward is split and gradients are views."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.planning import Join, Keep, by_hand, run, unet
from tests.support.size import some
from torchgpipe import plan, trace
from torchgpipe.planner.problem import problem_of
from torchgpipe.planner.search import Search, search
from torchgpipe.planner.trial import settings
from torchgpipe.skip import Namespace
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

#: What the prediction leaves out: losses, and the numbers of steps of an optimizer.
LOSSES = 4096


def layers():
    """A U-Net of one level, whose first and last layers may be on one device."""
    space = Namespace()
    return nn.Sequential(
        *[nn.Conv2d(3, 8, 3, padding=1), nn.LeakyReLU(), Keep().isolate(space), nn.MaxPool2d(2)],
        *[nn.Conv2d(8, 8, 3, padding=1), nn.LeakyReLU(), nn.ConvTranspose2d(8, 8, 2, stride=2)],
        *[Join().isolate(space), nn.Conv2d(16, 3, 3, padding=1)],
    )


@pytest.fixture(autouse=True)
def one_by_one(issuing, monkeypatch):
    """Have the caller issue: the order of threads, and so their memory, is up to the host."""
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)


@pytest.fixture(scope="module")
def problem(devices):
    x, y = torch.rand(2, 32, 3, 32, 32)
    with observe(costs={"convolution": 1.0}):
        options = {"loss": F.mse_loss, "targets": (y,), "timeout": 0}
        return problem_of(layers(), x, devices[:2], len(x), **options), x, y


@pytest.mark.parametrize(
    ("schedule", "balance", "modes"),
    [
        # The skip is what has arrived at the stage that stashes it.
        ("zero_bubble_v", (2, 3, 1, 3), ("never", "always", "never", "never")),
        ("zero_bubble_v", (2, 3, 1, 3), ("never",) * 4),
        # The gradient of the first layer's output is a view of one that is twice as large.
        ("zero_bubble_v", (3, 2, 1, 3), ("never",) * 4),
        ("zero_bubble_h1", (5, 4), ("never",) * 2),
        ("interleaved", (2, 3, 1, 3), ("never", "always", "never", "always")),
    ],
)
def test_peaks(devices, problem, schedule, balance, modes):
    found, x, y = problem
    setting = next(
        s
        for s in settings(found, [4])
        if s.name == schedule and len(s.schedule.placement) == len(balance)
    )
    trial = Search(found).trial(setting, balance, modes)
    places = [devices[w] for w in trial.schedule.placement]
    hand = by_hand([*balance], places, 4, [*modes], schedule)
    _, memory = run(hand, layers(), x, y, devices[:2])
    for place, predicted in zip(devices, trial.memory):
        assert predicted == pytest.approx(memory[place], abs=LOSSES)


@pytest.mark.parametrize("schedule", some(["one_f_one_b", "zero_bubble_h1"], ["zero_bubble_h1"]))
def test_large_gradients_are_added_in_place(devices, schedule):
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    x, y = torch.rand(2, 8, 512)
    with observe(costs={"addmm": 1.0, "mm": 1.0}):
        options = {"loss": F.mse_loss, "targets": (y,), "timeout": 0}
        trials = search(problem_of(model, x, devices[:2], len(x), **options), [2])
    trial = next(x for x in trials if x.setting.name == schedule)
    hand = by_hand([*trial.balance], trial.devices, 2, [*trial.modes], schedule)
    _, memory = run(hand, model, x, y, devices[:2])
    for place, predicted in zip(devices, trial.memory):
        assert predicted == pytest.approx(memory[place], abs=LOSSES)


@pytest.mark.parametrize(
    "schedule", some(["one_f_one_b", "interleaved", "zero_bubble_h1"], ["zero_bubble_h1"])
)
def test_clones_of_what_leaves(devices, schedule):
    """Clone on the stream that computes what leaves it, and no gradients that are views."""
    model, x, y = unet(0, 8), *torch.rand(2, 16, 3, 16, 16)
    costs = {"convolution": 5, "convolution_backward": 10, "copy_": 1}
    links = {(0, 1): 1e9, (1, 0): 1e9}
    options = {"devices": devices[:2], "loss": F.mse_loss, "targets": (y,), "chunks": [4]}
    with observe(costs=costs, bandwidth=links):
        plans = plan(model, x, **options, timeout=0)
        candidate = next(c for c in plans.candidates if c.schedule == schedule)
        training = candidate.wrap(model)
        x = x.to(devices[0])
        with trace(training) as timeline:
            training(x, y).backward()
    # Each loss is copied once more, so that nothing of its graph is kept.
    assert candidate.time + 4 == pytest.approx(timeline.step().makespan)
