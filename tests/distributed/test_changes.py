"""Between steps, anything may change that decides what processes send to each other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.test_schedules import beside, pipe_of
from tests.support.schedules import linear
from torchgpipe.distributed import messages
from torchgpipe.distributed.gradients import total_norm
from torchgpipe.distributed.peers import Peers


class Rate(nn.Module):
    """Dropout, whose probability has a name of its own."""

    def __init__(self):
        super().__init__()
        self.layer, self.rate = linear(), 0.0

    def forward(self, x):
        return F.dropout(self.layer(x), self.rate) if self.rate else self.layer(x)


def drawing(group):
    """Check numbers that a layer begins to draw after a step without any."""
    torch.manual_seed(0)
    layers = [Rate(), Rate()]
    one, training = beside(layers, chunks=2)
    pipe = pipe_of(layers, "1f1b", group, chunks=2, checkpoint="never")
    x, y = torch.rand(2, 4, 6)
    for k in range(3):
        torch.manual_seed(k)
        found = pipe.step(x, y)
        if k == 1:
            with pytest.raises(RuntimeError, match="call the step again"):
                training(x, y)
        torch.manual_seed(k)
        torch.testing.assert_close(found, training(x, y).detach())
        for layer in (*layers, *one):
            layer.rate = 0.5


def test_probabilities_of_any_name(processes):
    processes.run(drawing, 2)


class Bad:
    def __repr__(self):
        raise KeyError("no text")


def unshown(group):
    pipe = pipe_of([nn.Identity(), linear()], "1f1b", group)
    if pipe.is_first:
        with pytest.raises(KeyError):
            pipe((torch.rand(2, 6), Bad()))
    else:
        with pytest.raises(RuntimeError, match="rank 0: KeyError: 'no text'"):
            pipe(None)


def test_input_that_cannot_be_shown(processes):
    processes.run(unshown, 2)


def without_rows(group, targets):
    """Check a loss whose arguments do not tell the number of rows."""

    def loss(output, factor=2.0):
        return (output * factor).square().mean()

    pipe = pipe_of([linear(), linear()], "1f1b", group, loss=loss, chunks=4)
    first = pipe.step(torch.ones(8, 6) if pipe.is_first else None, *targets)
    again = pipe.step(torch.ones(8, 6), *targets)
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize("targets", [(), (0.5,)])
def test_loss_without_rows(targets, processes):
    processes.run(without_rows, 2, targets)


def forgetting(group):
    """Check that forms of steps do not pile up."""
    messages.MOST = 2
    try:
        pipe = pipe_of([linear(), linear()], "1f1b", group, chunks=2)
        for rows in (2, 4, 6, 8, 2, 6):
            x, y = torch.rand(2, rows, 6)
            pipe.step(x, y)
            assert len(pipe._forms._known) <= 2
    finally:
        messages.MOST = 100


def test_forms_are_forgotten(processes):
    processes.run(forgetting, 2)


def norms(group):
    """Check that a norm tells of gradients that are no numbers, wherever they are."""
    peers = Peers(group, torch.device("cpu"))
    weight = nn.Parameter(torch.ones(3))
    for bad in range(2):
        weight.grad = torch.full((3,), torch.nan if peers.rank == bad else 1.0)
        for kind in (1.0, 2.0, torch.inf):
            assert not total_norm([weight], kind, peers).isfinite()


def test_norms_of_what_is_no_number(processes):
    processes.run(norms, 2)
