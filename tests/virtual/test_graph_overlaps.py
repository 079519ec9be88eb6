"""Communication within stages hides behind the arithmetic of another cell, in virtual time."""

import pytest
import torch
from torch import nn

from tests.support.graphs import Exchange
from tests.support.helpers import assert_no_races, wrap
from tests.support.schedules import V
from tests.support.size import soak, some
from tests.virtual.stages import squares
from torchgpipe import ScheduledLoss
from torchgpipe.schedule import named
from torchgpipe.testing import Busy, observe

SEEDS = range(some(20, 2))
WIDTH = 4


def stage(share):
    """A stage whose forward takes 1, and backward 2, of which communication takes a share."""
    own = (1 - share) / 2
    return nn.Sequential(
        Busy(own, own, own, features=WIDTH),
        Exchange(share, 2 * share),
        Busy(own, own, own, features=WIDTH),
    )


def pairs(workers, m):
    """1F1B of pairs of micro-batches, each pair forward together and backward together."""
    return named("1f1b", workers, m // 2).pair()


def training_of(devices, schedule, m, share=0.2, layer=stage):
    model = wrap([layer(share) for _ in devices], devices, "never", m)
    return ScheduledLoss(model, squares, schedule, stages="graph")


def train(training, seeds=(None,)):
    """The makespan of steps, which must not race."""
    devices, m = training.model.devices, training.model.chunks
    x = torch.rand(m, WIDTH, device=devices[0])
    y = torch.rand(m, WIDTH, device=devices[-1])
    training(x, y)
    found = []
    for seed in seeds:
        with observe(jitter=seed) as seen:
            training(x, y)
        assert_no_races(seen)
        found.append(seen.makespan)
    (only,) = {*found}
    return only


def hidden(devices, schedule, m, stages):
    """The share of communication that takes no time."""
    slow = train(training_of(devices, schedule, m))
    fast = train(training_of(devices, schedule, m, share=0.2, layer=silent))
    return 1 - (slow - fast) / (stages * m * 0.6)


def silent(share):
    """The same stage, whose communication takes no time."""
    layers = stage(share)
    layers[1] = Exchange()
    return layers


def test_pairs_of_forwards_and_of_backwards(devices):
    assert hidden(devices[:4], pairs(4, 16), 16, 1) == pytest.approx(1)


def test_forward_beside_backward(devices):
    # In the first cells and in the last ones there is nothing to hide behind.
    assert hidden([devices[w] for w in V], "dualpipe_v", 32, 2) > 0.9


@soak
def test_without_overlaps_all_of_it_takes_time(devices):
    assert hidden(devices[:4], "1f1b", 16, 1) < 0


def test_host_that_stumbles(devices):
    train(training_of(devices[:2], pairs(2, 8), 8), (None, *SEEDS))
    train(training_of([devices[w] for w in V], "dualpipe_v", 8), (None, *SEEDS))


@pytest.mark.filterwarnings("ignore:a stage must be traceable")
@pytest.mark.parametrize("eager", some([False, True], [True]))
def test_gradients(devices, eager):
    """Cells of one stage side by side, and of two stages, compute what each computes alone."""
    for where, schedule in (
        (devices[:4], pairs(4, 8)),
        ([devices[w] for w in V], named("dualpipe_v", 2, 8)),
    ):
        found = []
        for stages in ("eager", "graph"):
            torch.manual_seed(0)
            training = training_of(where, schedule, 8)
            training.stages = stages
            if eager:
                # Such a stage is no graph.
                training.model.partitions[1].register_forward_hook(lambda *_: None)
            x = torch.rand(8, WIDTH, device=where[0], requires_grad=True)
            y = torch.rand(8, WIDTH, device=where[-1])
            training(x, y).backward()
            assert [x.last is None for x in training.graphs] in ([], [False, eager, False, False])
            found.append([x.grad, *[p.grad for p in training.parameters()]])
        for a, b in zip(*found):
            torch.testing.assert_close(a.cpu(), b.cpu())


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Exchange())

    def forward(self, x):
        return self.layers(x)


class Changing(nn.Module):
    """A layer that changes what it has sent in place, and reads it."""

    def __init__(self):
        super().__init__()
        self.layer, self.exchange = nn.Linear(WIDTH, WIDTH), Exchange(1.0, 1.0)

    def forward(self, x):
        x = self.layer(x)
        y = self.exchange(x)
        x.add_(1)
        return x + y


def test_changes_in_place_around_a_message(devices):
    train(training_of(devices[:2], pairs(2, 4), 4, layer=lambda _: Changing()), (None, *SEEDS))


@pytest.mark.parametrize("kind", ["pairs", "dualpipe_v"])
def test_random_numbers(devices, kind):
    """Each micro-batch draws its own numbers, whatever runs beside it."""
    where = devices[:2] if kind == "pairs" else [devices[w] for w in V]
    schedule = pairs(2, 4) if kind == "pairs" else kind
    found = []
    for stages in ("eager", "graph"):
        torch.manual_seed(0)
        training = training_of(where, schedule, 4, layer=lambda _: Noisy())
        training.stages = stages
        x = torch.rand(8, WIDTH, device=where[0])
        torch.manual_seed(1)
        for _ in range(2):
            training(x, x.to(where[-1])).backward()
        found.append([p.grad.cpu() for p in training.parameters()])
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)
