"""DistributedDataParallel around GPipe: its settings, its hooks, and its errors."""

import copy
import datetime

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.helpers import wrap
from tests.support.pairs.models import (
    PLACES,
    RANKS,
    STEPS,
    TINY,
    Centred,
    assert_gradients,
    batch,
    dropout,
    loss,
    norms,
    part,
    plain,
    train,
    unused,
)

SETTINGS = {
    "default": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
    "accumulate": {},
}


def parallel(rank, make, mode, setting, cap=TINY):
    layers = make().double()
    reference = copy.deepcopy(layers)
    how = SETTINGS[setting]
    if make is unused and setting in ("default", "bucket view", "accumulate"):
        how = how | {"find_unused_parameters": True}
    model = DistributedDataParallel(wrap(layers, PLACES, mode), bucket_cap_mb=cap, **how)
    train(rank, model, reference, batches=3 if setting == "accumulate" else 1)


def random_numbers(rank, mode):
    """Each process has its own numbers; gradients are the mean of those of each process alone."""
    model = DistributedDataParallel(wrap(dropout().double(), PLACES, mode), bucket_cap_mb=TINY)
    alone = copy.deepcopy(model.module)
    for k in range(STEPS):
        x = part(batch(), rank)
        for each in (model, alone):
            each.zero_grad()
            torch.manual_seed(10 * k + rank)
            loss(each(x)).backward()
        for parameter in alone.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= RANKS
        assert_gradients(model, alone)
        torch.manual_seed(k)


def unused_by_default(rank, mode):
    """An unused parameter is an error of the second step, as around the plain model."""
    for layers in (unused().double(), wrap(unused().double(), PLACES, mode)):
        model = DistributedDataParallel(layers)
        loss(model(part(batch(), rank))).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(part(batch(), rank))


def batch_norm(rank, mode, deferred):
    """Norms use the micro-batches of each process; running statistics are the first process's."""
    layers = norms().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, PLACES, mode, 2, deferred_batch_norm=deferred))
    others = [copy.deepcopy(layers[1].running_mean) for _ in range(RANKS)]
    for _ in range(STEPS):
        model.zero_grad()
        reference.zero_grad()
        x = batch()
        loss(model(part(x, rank))).backward()
        for rows in x.chunk(2 * RANKS):
            (loss(reference(rows)) / (2 * RANKS)).backward()
        assert_gradients(model, reference)
    own = layers[1].running_mean.clone()
    distributed.all_gather(others, own)
    assert not torch.equal(*others)
    model.eval()(part(batch(), rank))
    assert torch.equal(layers[1].running_mean, others[0])
    assert layers[1].num_batches_tracked == STEPS * (1 if deferred else 2)


def communicating(rank, mode):
    """A layer that communicates does so again in recomputation, in the same order everywhere."""
    layers = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 4), Centred()).double()
    reference = copy.deepcopy(layers)
    for layer in reference[1::2]:
        layer.alone = True
    model = DistributedDataParallel(wrap(layers, PLACES, mode, 2))
    for _ in range(STEPS):
        model.zero_grad()
        reference.zero_grad()
        x = batch()
        loss(model(part(x, rank))).backward()
        # The first micro-batches of all processes together, and the second ones.
        ones, others = zip(*[x.chunk(2) for x in x.chunk(RANKS)])
        for rows in (ones, others):
            (loss(reference(torch.cat(rows))) / 2).backward()
        assert_gradients(model, reference)


def uneven_shards(rank, mode):
    """The mean over processes is that of all rows if each process weighs its rows."""
    layers = plain().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, PLACES, mode))
    x = batch()
    output = model(x[:5] if rank == 0 else x[5:])
    (loss(output) * RANKS * len(output) / len(x)).backward()
    loss(reference(x)).backward()
    assert_gradients(model, reference)


class Fails(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise LookupError("of one process")
        return x


def failing(rank, mode):
    """The error says where a process failed; others wait until a time-out, and go on anew."""
    layers = plain().double()
    layers[3] = Fails()
    reference = copy.deepcopy(layers)
    model = wrap(layers, PLACES, mode)
    short = distributed.new_group(timeout=datetime.timedelta(seconds=0.5))
    layers[3].fails = rank == 1
    one = DistributedDataParallel(model, process_group=short)
    x = part(batch(), rank)
    if rank == 1:
        with pytest.raises(LookupError) as caught:
            one(x)
        notes = [*getattr(caught.value, "__notes__", ()), str(caught.value.__cause__)]
        assert "partition 1" in "".join(notes)
    else:
        with pytest.raises(RuntimeError, match=r"Timed out|timed out|closed by peer"):
            loss(one(x)).backward()
    layers[3].fails = False
    train(rank, DistributedDataParallel(model), reference)
