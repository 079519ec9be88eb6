"""Steps over several processes, beside the same micro-batches one after another in one."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import wrap
from tests.support.schedules import (
    CASES,
    ONE,
    TWO,
    linear,
    moved_input,
    reference,
    same,
    targets_of,
)
from tests.support.size import SOAK, rotated
from torchgpipe import GPipe, ScheduledLoss, is_recomputing

MODES = ["except_last", "never", "always"]

#: Schedules with the numbers of processes for four stages, and those of one run.
SIZES = {**dict.fromkeys(ONE, 4), **dict.fromkeys(TWO, 2)}


def pipe_of(layers, name, group, *, loss=F.mse_loss, **options):
    """A pipe with one stage for each layer."""
    from torchgpipe.distributed import Pipe

    return Pipe(
        nn.Sequential(*layers), [1] * len(layers), loss=loss, schedule=name, group=group, **options
    )


def beside(layers, *, chunks=4, mode="except_last"):
    """A copy of the layers in one process, and its training."""
    one = wrap(copy.deepcopy(layers), ["cpu"] * len(layers), mode, chunks)
    return one, ScheduledLoss(one, F.mse_loss, "fill_drain")


def compare(group, kind, name, mode):
    """Check that steps have the loss, gradients and buffers of the reference."""
    case = CASES[kind]()
    torch.manual_seed(1)
    layers = copy.deepcopy(case.layers)
    pipe = pipe_of(
        copy.deepcopy(case.layers),
        name,
        group,
        loss=case.loss,
        chunks=case.chunks,
        checkpoint=mode,
        **case.options,
    )
    input, targets = moved_input(case.input, pipe.device), targets_of(case)
    for _ in range(2):
        expected = reference(case, layers)
        given = (input, targets) if pipe.is_first or pipe.is_last else (None, ())
        loss = pipe.step(given[0], *given[1])
        torch.testing.assert_close(loss, expected)
    plain = nn.Sequential(*layers)
    names = dict(plain.named_parameters(remove_duplicate=False))
    for key, own in pipe.named_parameters(remove_duplicate=False):
        same(own.grad, names[key].grad)
    if case.options:
        # Norms that are deferred have the whole mini-batch in mind, as under GPipe.
        plain = nn.Sequential(*copy.deepcopy(case.layers))
        wrapped = GPipe(plain, [4], devices=["cpu"], chunks=case.chunks, **case.options)
        for _ in range(2):
            wrapped(case.input)
        plain = wrapped.module
    buffers = dict(plain.named_buffers())
    for key, own in pipe.named_buffers():
        same(own, buffers[key])
    if pipe.is_first:
        same(input.grad, case.input.grad)


@pytest.mark.parametrize(
    ("kind", "name", "mode"),
    rotated(CASES, [*SIZES] if SOAK else ["1f1b", "zbv", "zbh1", "dualpipe_v"], MODES),
)
def test_case(kind, name, mode, processes):
    processes.run(compare, SIZES[name], kind, name, mode)


def dropping(count):
    """Make stages; in double precision, since AdamW makes much of a gradient that is nearly 0."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(6)).double()
        for _ in range(count)
    ]


def train(group, name, stages, mode):
    """Check steps of AdamW with dropout, mini-batches of changing sizes, and evaluations between.

    The generators are where one process leaves them. Returns the largest difference.
    """
    layers = dropping(stages)
    one, training = beside(layers, mode=mode)
    pipe = pipe_of(layers, name, group, chunks=4, checkpoint=mode)
    optimizers = [torch.optim.AdamW(x.parameters(), 0.01) for x in (one, pipe)]
    parameters = dict(one.module.named_parameters())
    worst = 0.0
    for k, rows in enumerate([12, 12, 14, 12, 10]):
        torch.manual_seed(k)
        x, y = torch.randn(2, rows, 6).double()
        before = torch.get_rng_state()
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = training(x, y)
        expected.backward()
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        loss = pipe.step(x, y)
        assert torch.equal(after, torch.get_rng_state())
        pairs = [(loss, expected)]
        for key, own in pipe.named_parameters():
            assert own.grad is not None
            pairs.append((own.grad, parameters[key].grad))
        for optimizer in optimizers:
            optimizer.step()
        pipe.eval()
        one.eval()
        output = pipe(x)
        if pipe.is_last:
            pairs.append((output, one(x)))
        else:
            assert output is None
        pipe.train()
        one.train()
        worst = max(worst, *((own - other).abs().max().item() for own, other in pairs))
    return worst


#: Each schedule with a number of processes, and the modes by turns.
TRAININGS = [
    (name, size, mode)
    for k, name in enumerate([*ONE, *TWO])
    for size, mode in zip([2, 4, 1], MODES[k % 3 :] + MODES)
    if SOAK or size == (4, 2, 2, 4)[k % 4] or name == "fill_drain"
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "size", "mode"), TRAININGS)
def test_training(name, size, mode, processes):
    worst = max(processes.run(train, size, name, size * (1 if name in ONE else 2), mode))
    assert worst <= (0 if name == "fill_drain" else 1e-6)


#: Stages, whichever process has them.
MIXED = ["always", "never", "except_last", "never"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_mode_for_each_stage(name, processes):
    assert max(processes.run(train, 2 if name in TWO else 4, name, 4, MIXED)) <= 1e-6


def count_recomputations(group, modes):
    layers = [Counted() for _ in range(2)]
    pipe = pipe_of(layers, "fill_drain", group, chunks=3, checkpoint="never")
    pipe.checkpoint = modes
    pipe.step(torch.rand(6, 6), torch.rand(6, 6))
    (own,) = pipe.stages
    return layers[own].again, pipe.checkpoint


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.again = linear(), 0

    def forward(self, x):
        self.again += is_recomputing()
        return self.layer(x).tanh()


@pytest.mark.parametrize(
    ("modes", "counts"), [(["always", "never"], [3, 0]), (["never", "always"], [0, 3])]
)
def test_recomputations_of_each_stage(modes, counts, processes):
    assert processes.run(count_recomputations, 2, modes) == [(count, modes) for count in counts]


def wrong_modes(group):
    with pytest.raises(ValueError, match=r"one for each partition.*partitions: 2") as error:
        pipe_of([linear(), linear()], "1f1b", group, checkpoint=["never"])
    pipe = pipe_of([linear(), linear()], "1f1b", group, chunks=2)
    pipe.checkpoint = ["never", "always"] if pipe.is_first else ["always", "never"]
    with pytest.raises(ValueError, match=r"same settings.*differing: checkpoint.*\[0, 1\]"):
        pipe.step(torch.rand(4, 6), torch.rand(4, 6))
    return str(error.value)


def test_wrong_modes(processes):
    processes.run(wrong_modes, 2)


class Sudden(nn.Module):
    """A layer that begins to draw without a sign of it."""

    draws = 0

    def forward(self, input):
        return input + torch.rand_like(input) if self.draws else input * 1


def sudden(group, j):
    """Check the step after one in which layers draw all of a sudden: of stage j, or of both."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(3, 3), Sudden()) for _ in range(2)]
    one, training = beside(layers, chunks=2)
    pipe = pipe_of(layers, "1f1b", group, chunks=2)
    x, y = torch.rand(2, 4, 3)
    for _ in range(2):
        torch.testing.assert_close(pipe.step(x, y), training(x, y))
    for k, stage in enumerate([*one.module, *layers]):
        stage[1].draws = int(j in (None, k % 2))
    # It takes note of that, too; a recomputation may find out first.
    with pytest.raises(RuntimeError, match="call the step again|must draw the same random"):
        training(x, y)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    pipe.step(x, y)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    loss = pipe.step(x, y)
    assert not torch.equal(after, torch.get_rng_state())
    torch.set_rng_state(after)
    torch.testing.assert_close(loss, training(x, y))
    return after


@pytest.mark.parametrize("j", [None, 0, 1])
def test_layer_that_draws_suddenly(j, processes):
    one, two = processes.run(sudden, 2, j)
    assert torch.equal(one, two)
