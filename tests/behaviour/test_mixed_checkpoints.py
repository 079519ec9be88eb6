"""A checkpoint mode for each partition: gradients are the same, and each is computed by its own."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contract.layers import Pop
from tests.support.helpers import MODES
from tests.support.size import rotated
from torchgpipe import GPipe, ScheduledLoss, is_recomputing
from torchgpipe.skip import skippable, stash

CHUNKS = 3
COMBINATIONS = rotated(MODES, MODES, MODES)


class Counter(nn.Module):
    """A layer that counts its recomputations, and changes a buffer."""

    def __init__(self):
        super().__init__()
        self.again = 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.again += is_recomputing()
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean())
        return x * (1 + self.average)


@skippable(stash=["far"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("far", x.sin())
        return x


def stages(plain=False):
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(6))
        for _ in range(3)
    ]
    if not plain:
        layers[0].append(Stash())
        layers[2].insert(0, Pop())
        for own in layers:
            own.insert(1, Counter())
    return nn.Sequential(*layers)


def wrap(module, modes):
    return GPipe(module, [1] * 3, devices=["cpu"] * 3, chunks=CHUNKS, checkpoint=modes)


def trained(module, step):
    """Losses, gradients, buffers and the generator's state after two steps."""
    torch.manual_seed(1)
    x = torch.rand(7, 6, requires_grad=True)
    losses = [step(x, torch.rand(7, 6)) for _ in range(2)]
    for loss in losses:
        loss.backward()
    grads = [p.grad for p in module.parameters()]
    return [*losses, x.grad, *grads, *module.buffers(), torch.get_rng_state()]


def assert_equal(found, expected):
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.fixture(scope="module")
def expected():
    module = stages()
    model = wrap(module, "never")
    return trained(module, lambda x, y: F.mse_loss(model(x), y))


@pytest.mark.parametrize("modes", COMBINATIONS, ids=" ".join)
def test_step(modes, expected):
    module = stages()
    model = wrap(module, modes)
    found = trained(module, lambda x, y: F.mse_loss(model(x), y))
    assert_equal(found, expected)
    again = {"never": 0, "except_last": CHUNKS - 1, "always": CHUNKS}
    for mode, own in zip(modes, module):
        counter = next(x for x in own if isinstance(x, Counter))
        assert counter.again == 2 * again[mode]


def reference(name, **options):
    module = stages(bool(options))
    return trained(module, ScheduledLoss(wrap(module, "never"), F.mse_loss, name, **options))


@pytest.fixture(scope="module", params=["1f1b", "zbh1"])
def schedule(request):
    return request.param, reference(request.param)


@pytest.mark.parametrize("modes", COMBINATIONS, ids=" ".join)
def test_schedule(modes, schedule):
    name, expected = schedule
    module = stages()
    training = ScheduledLoss(wrap(module, modes), F.mse_loss, name)
    assert_equal(trained(module, training), expected)
    plan = training._plan(CHUNKS, forward=False)
    for j, (mode, own) in enumerate(zip(modes, module)):
        counter = next(x for x in own if isinstance(x, Counter))
        rs = [cell for cell in plan.again if cell[0] == j]
        assert counter.again == 2 * len(rs)
        # The last stage runs backward right after forward: that alone would free nothing.
        count = {"never": 0, "except_last": 0 if j == 2 else CHUNKS - 1, "always": CHUNKS}[mode]
        assert len(rs) == count


@pytest.fixture(scope="module")
def graphs():
    return reference("1f1b", stages="graph")


@pytest.mark.parametrize(
    "modes", [("always", "never", "except_last"), ("never", "except_last", "always")], ids=" ".join
)
@pytest.mark.parametrize("recompute", ["everything", "min-cut"])
def test_graphs(modes, recompute, graphs):
    module = stages(plain=True)
    training = ScheduledLoss(
        wrap(module, modes), F.mse_loss, "1f1b", stages="graph", recompute=recompute
    )
    assert_equal(trained(module, training), graphs)
    # A graph, and not the layers, has computed.
    assert all(x.last is not None and not x.reasons for x in training.graphs)


@pytest.mark.parametrize("scheduled", [False, True])
def test_changed_between_steps(scheduled):
    module = stages()
    model = wrap(module, ["always", "never", "never"])
    if scheduled:
        step = ScheduledLoss(model, F.mse_loss, "fill_drain")
    else:
        step = lambda x, y: F.mse_loss(model(x), y)  # noqa: E731
    counters = [next(x for x in own if isinstance(x, Counter)) for own in module]
    x, y = torch.rand(6, 6), torch.rand(6, 6)
    counts = []
    for modes in (None, ["never", "always", "never"], "never", ["never", "never", "always"]):
        model.checkpoint = modes or model.checkpoint
        step(x, y).backward()
        counts.append([counter.again for counter in counters])
    assert counts == [[3, 0, 0], [3, 3, 0], [3, 3, 0], [3, 3, 3]]


@pytest.mark.parametrize("modes", [*product(["always", "never"], repeat=2)], ids=" ".join)
def test_layer_in_two_partitions(modes):
    """A layer that changes its buffer is computed again in one of its partitions alone."""
    found = []
    for chosen in ("never", modes):
        torch.manual_seed(0)
        shared = nn.Sequential(nn.Linear(6, 6), Counter(), nn.Tanh())
        module = nn.Sequential(shared, nn.Dropout(0.3), shared)
        model = GPipe(module, [2, 1], devices=["cpu"] * 2, chunks=CHUNKS, checkpoint=chosen)
        found.append(trained(module, lambda x, y, model=model: F.mse_loss(model(x), y)))
    assert_equal(*found)
