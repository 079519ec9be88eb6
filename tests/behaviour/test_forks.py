"""Forked children: a wrapper works there, even if the parent was in the middle of a step."""

import copy
import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.forks import WIDTH, Pausing, forward, in_child, layers, step
from tests.support.helpers import Apply
from tests.support.long_runs import WAYS
from torchgpipe import GPipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here"),
]


@pytest.fixture(params=WAYS)
def wrap(request):
    return partial(WAYS[request.param], balance=[2, 2], chunks=2, devices=["cpu"] * 2)


@pytest.mark.parametrize("when", ["forward", "recomputation"])
@pytest.mark.parametrize("use", [forward, step])
def test_child_forked_while_a_thread_is_in_a_step(wrap, use, when):
    """Nobody holds the thread's locks in the child."""
    # Workers that draw from the generator of the CPU at once would get different numbers.
    way = wrap if when == "forward" else partial(GPipe, **wrap.keywords)
    pausing = Pausing(when)
    paused, other = way(layers(pausing), checkpoint="always"), wrap(layers(), checkpoint="always")
    expected = use(other)
    with pausing.within_a_step_of(paused):
        assert in_child(partial(use, other)) == expected
    assert use(other) == expected


def test_child_forked_within_a_layer(wrap):
    other, found = wrap(layers(), checkpoint="always"), []

    def fork(x):
        found.append(in_child(partial(step, other)))
        return x

    model = wrap(layers(Apply(fork)), checkpoint="never")
    step(model)
    assert found == [step(other)] * model.chunks


def test_backward_in_a_child_of_what_was_computed_before(wrap):
    model = wrap(layers(), checkpoint="always")
    output = model(torch.ones(4, WIDTH))

    def gradients():
        found = torch.autograd.grad(output.sum(), [*model.parameters()])
        return [x.tolist() for x in found]

    found = in_child(gradients)
    assert found == gradients()


class Rows(Dataset):
    """A data set of rows of numbers, passed through a model if there is one."""

    def __init__(self, model=None):
        self.model = model

    def __len__(self):
        return 16

    def __getitem__(self, k):
        row = torch.full((WIDTH,), k / 16)
        if self.model is None:
            return row
        with torch.no_grad():
            return self.model(row[None])[0]


def train(model, dataset, **options):
    torch.manual_seed(0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in DataLoader(dataset, batch_size=8, **options):
        torch.manual_seed(1)
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("preprocessed", [False, True], ids=["plainly", "through a wrapper"])
def test_loader_with_forked_workers_beside_a_wrapper(wrap, preprocessed):
    frozen = wrap(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]))
    dataset = Rows(frozen.eval() if preprocessed else None)
    module = layers()
    expected = train(wrap(copy.deepcopy(module)), dataset)
    options = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 30}
    assert train(wrap(module), dataset, **options) == expected
