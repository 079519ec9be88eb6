"""What two processes compute together.

``run()`` has one pair do all of it, since torch takes long to import. A case is a function of the
process's rank, which raises if something is not as it should be.
"""

import copy
import datetime
import os
import tempfile
import traceback
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DataLoader, DistributedSampler

from tests.recomputation import MODES
from tests.test_sharding import GATHERS_AGAIN
from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash

RANKS, CHUNKS, STEPS = 2, 3, 2
#: Several buckets of gradients, even for tiny models.
TINY = 1e-5


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Pop(nn.Linear):
    def forward(self, x):
        skip = yield pop("skip")
        return super().forward(x) + skip


class PartlyUsed(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.unused = nn.Parameter(torch.ones(3))


class Reduced(torch.autograd.Function):
    """The sum over processes."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Reduced.apply(grad)


class Centred(nn.Module):
    """Communicates in forward and in backward, as nn.SyncBatchNorm does on accelerators."""

    alone = False

    def forward(self, x):
        if self.alone:
            return (x - x.mean(0)).tanh()
        return (x - Reduced.apply(x.sum(0)) / (RANKS * len(x))).tanh()


def plain():
    hidden = (layer for _ in range(2) for layer in (nn.Tanh(), nn.Linear(4, 4)))
    return nn.Sequential(nn.Linear(4, 4), *hidden, nn.GELU())


def skips():
    return nn.Sequential(Stash(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), Pop(4, 4), nn.GELU())


def unused():
    layers = plain()
    layers[0], layers[4] = PartlyUsed(4, 4), PartlyUsed(4, 4)
    return layers


def tied():
    layers = plain()
    layers[2].weight = layers[0].weight
    layers[4].weight = layers[0].weight
    return layers


def dropout():
    layers = plain()
    layers[1], layers[3] = nn.Dropout(0.4), nn.Dropout(0.4)
    return layers


def norms():
    layers = plain()
    layers[1], layers[5] = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    return layers


def blocks():
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)]
    )


def wrap(layers, mode, chunks=CHUNKS, **how):
    first = len(layers) // 2
    return GPipe(
        layers,
        [first, len(layers) - first],
        devices=["cpu"] * 2,
        chunks=chunks,
        checkpoint=mode,
        **how,
    )


def batch(rows=8):
    """The whole batch, the same in each process."""
    return torch.randn(rows, 4, dtype=torch.double)


def part(x, rank):
    return x.chunk(RANKS)[rank]


def loss(output):
    return output.square().mean()


def assert_gradients(model, reference, **close):
    for one, other in zip(model.parameters(), reference.parameters()):
        if other.grad is None:
            assert one.grad is None or not one.grad.any()
        else:
            assert_close(one.grad, other.grad, **close)


def train(rank, model, reference, batches=1, whole=loss):
    """Takes steps with both, and compares gradients and weights."""
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, reference)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for k in range(1, batches + 1):
            x = batch()
            if k < batches:
                with model.no_sync():
                    loss(model(part(x, rank))).backward()
            else:
                loss(model(part(x, rank))).backward()
            whole(reference(x)).backward()
        assert_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()


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
    model = DistributedDataParallel(wrap(layers, mode), bucket_cap_mb=cap, **how)
    train(rank, model, reference, batches=3 if setting == "accumulate" else 1)


def random_numbers(rank, mode):
    """Each process has its own; the gradients are the mean of those that each has alone."""
    model = DistributedDataParallel(wrap(dropout().double(), mode), bucket_cap_mb=TINY)
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
    """Is an error of the second step, as around the plain model."""
    for layers in (unused().double(), wrap(unused().double(), mode)):
        model = DistributedDataParallel(layers)
        loss(model(part(batch(), rank))).backward()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(part(batch(), rank))


def batch_norm(rank, mode, deferred):
    """Normalises by the micro-batches of each process; the running statistics are the first's."""
    layers = norms().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, mode, 2, deferred_batch_norm=deferred))
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
    """A layer that communicates does so again in its second run, in the same order everywhere."""
    layers = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 4), Centred()).double()
    reference = copy.deepcopy(layers)
    for layer in reference[1::2]:
        layer.alone = True
    model = DistributedDataParallel(wrap(layers, mode, 2))
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
    """The mean over processes is that of all rows if each weighs as many rows as it has."""
    layers = plain().double()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, mode))
    x = batch()
    output = model(x[:5] if rank == 0 else x[5:])
    (loss(output) * RANKS * len(output) / len(x)).backward()
    loss(reference(x)).backward()
    assert_gradients(model, reference)


def uneven_batches(rank, mode):
    """Who has no more batches takes part in the gradients of others, within Join."""
    model = DistributedDataParallel(wrap(plain().double(), mode))
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
    """Hooks of the communication."""
    layers = plain()
    reference = copy.deepcopy(layers)
    model = DistributedDataParallel(wrap(layers, mode), bucket_cap_mb=TINY)
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
    model = DistributedDataParallel(wrap(layers, mode))
    x = batch()
    loss(model(part(x, rank))).backward()
    loss(reference(x)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, reference)]
    assert_close(*norms)
    assert_gradients(model, reference)


def within_parent(rank, mode):
    parent = nn.Sequential(nn.Linear(4, 4), wrap(skips(), mode), nn.Linear(4, 1)).double()
    reference = copy.deepcopy(parent)
    train(rank, DistributedDataParallel(parent, bucket_cap_mb=TINY), reference)


class Fails(nn.Module):
    fails = False

    def forward(self, x):
        if self.fails:
            raise LookupError("of one process")
        return x


def failing(rank, mode):
    """Who fails says where; the others wait until their time is over, and go on anew."""
    layers = plain().double()
    layers[3] = Fails()
    reference = copy.deepcopy(layers)
    model = wrap(layers, mode)
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
    model = DistributedDataParallel(wrap(layers, mode))
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


def sharded(rank, mode, what, **how):
    """FSDP2: gradients and weights are shards of those of one process."""
    reference = blocks().double()
    model = wrap(copy.deepcopy(reference), mode)
    how["mesh"] = init_device_mesh("cpu", (RANKS,))
    parts = {"layers": model, "partitions": model.partitions}
    for each in parts.get(what.split()[0], ()):
        fully_shard(each, **how)
    if what == "parent":
        head = nn.Linear(4, 4).double()
        model, reference = (nn.Sequential(x, copy.deepcopy(head)) for x in (model, reference))
    if what.endswith(("all", "parent")):
        fully_shard(model, **how)
    steps_of_shards(rank, model, reference)


def steps_of_shards(rank, model, reference, split=True):
    optimizers = [torch.optim.SGD(x.parameters(), 0.1, momentum=0.9) for x in (model, reference)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        x = batch()
        loss(model(part(x, rank) if split else x)).backward()
        loss(reference(x)).backward()
        for one, other in zip(model.parameters(), reference.parameters()):
            assert_close(one.grad.full_tensor(), other.grad)
        for optimizer in optimizers:
            optimizer.step()


def tensor_parallel(rank, mode):
    """Each process has a part of each layer, and all rows."""
    reference = blocks().double()
    layers = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in layers:
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    steps_of_shards(rank, wrap(layers, mode), reference, split=False)


def _named(function, **how):
    words = [x.__name__ if callable(x) else str(x) for x in how.values()]
    return " ".join([function.__name__, *words]), partial(function, **how)


CASES = dict(
    [
        *[
            _named(parallel, make=make, mode=mode, setting=setting)
            for make, mode, setting in [
                *product([plain], MODES, SETTINGS),
                *product([skips], MODES, ["default", "find unused", "static graph"]),
                *product([unused, tied], ["never", "always"], ["default", "static graph"]),
            ]
        ],
        *[_named(parallel, make=plain, mode=mode, setting="default", cap=25) for mode in MODES],
        *[
            _named(function, mode=mode)
            for function, mode in product(
                [
                    random_numbers,
                    unused_by_default,
                    communicating,
                    uneven_shards,
                    uneven_batches,
                    clipped,
                    within_parent,
                ],
                MODES,
            )
        ],
        *[
            _named(batch_norm, mode=mode, deferred=deferred)
            for mode, deferred in product(MODES, [False, True])
        ],
        *[
            _named(hooked, mode=mode, hook=hook)
            for mode, hook in product(
                MODES, [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook]
            )
        ],
        _named(failing, mode="always"),
        _named(forking_loader, mode="always"),
        _named(tensor_parallel, mode="always"),
        _named(sharded, mode="always", what="all"),
        *[
            _named(sharded, mode=mode, what=what, reshard_after_forward=reshard)
            for mode, (what, reshard) in product(
                # What is gathered for all of the model has to stay until backward is over.
                MODES,
                [("layers", True), ("partitions and all", None), ("parent", None)],
            )
            if mode == "never" or what != "layers" or GATHERS_AGAIN
        ],
    ]
)


def work(rank, names, folder):
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/outcomes", RANKS)
    outcomes = {}
    failed = 0
    for k, name in enumerate(names):
        if k == 0 or failed:
            if k:
                distributed.destroy_process_group()
            distributed.init_process_group(
                "gloo",
                store=distributed.PrefixStore(str(k), store),
                rank=rank,
                world_size=RANKS,
                timeout=datetime.timedelta(seconds=20),
            )
        torch.manual_seed(0)
        outcome = ""
        try:
            CASES[name](rank)
        except BaseException:
            outcome = traceback.format_exc()
        outcomes[name] = outcome
        # Also where a process has left a case before the other one.
        store.set(f"{k} {rank}", outcome)
        found = [store.get(f"{k} {other}") for other in range(RANKS)]
        failed = any(found)
    torch.save(outcomes, f"{folder}/{rank}.pt")
    # Without waiting for threads of a group that failed.
    os._exit(0)


def run(names):
    """Of each case the tracebacks of both processes, empty if all is as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (names, folder), nprocs=RANKS)
        both = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(RANKS)]
    return {name: [outcomes[name] for outcomes in both] for name in names}
