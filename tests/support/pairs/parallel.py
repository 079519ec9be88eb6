"""DistributedDataParallel around GPipe: its settings, its hooks, and its errors."""

import copy
import datetime

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

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
    skips,
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


def uneven_batches(rank, mode):
    """A process without batches takes part in the gradients of others, within Join."""
    model = DistributedDataParallel(wrap(plain().double(), PLACES, mode))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        for _ in range(1 + 2 * rank):
            optimizer.zero_grad()
            loss(model(part(batch(), rank))).backward()
            optimizer.step()
    for parameter in model.parameters():
        others = [torch.empty_like(parameter) for _ in range(RANKS)]
        distributed.all_gather(others, parameter.detach())
        assert torch.equal(*others)


def hooked(rank, mode, hook):
    """Hooks of the communication see the same gradients as around the plain model."""
    layers = plain()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, PLACES, mode), bucket_cap_mb=TINY)
    model.register_comm_hook(None, hook)
    for _ in range(STEPS):
        model.zero_grad()
        reference.zero_grad()
        x = batch().float()
        loss(model(part(x, rank))).backward()
        loss(reference(x)).backward()
        assert_gradients(model, reference, rtol=1e-2, atol=1e-4)


def clipped(rank, mode):
    layers = plain().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, PLACES, mode))
    x = batch()
    loss(model(part(x, rank))).backward()
    loss(reference(x)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, reference)]
    assert_close(*norms)
    assert_gradients(model, reference)


def within_parent(rank, mode):
    parent = nn.Sequential(nn.Linear(4, 4), wrap(skips(), PLACES, mode), nn.Linear(4, 1)).double()
    reference = copy.deepcopy(parent)
    train(rank, DistributedDataParallel(parent, bucket_cap_mb=TINY), reference)


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


def forking_loader(rank, mode):
    layers = plain().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, PLACES, mode))
    data = batch(24)
    samplers = [DistributedSampler(data, RANKS, rank), DistributedSampler(data, 1, 0)]
    how = [{"num_workers": 1, "multiprocessing_context": "fork"}, {}]
    sizes = [8 // RANKS, 8]
    loaders = [DataLoader(data, n, sampler=s, **h) for n, s, h in zip(sizes, samplers, how)]
    for own, whole in zip(*loaders):
        model.zero_grad()
        reference.zero_grad()
        loss(model(own)).backward()
        loss(reference(whole)).backward()
        assert_gradients(model, reference)
