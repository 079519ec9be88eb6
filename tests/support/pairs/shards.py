"""FSDP2 and tensor parallelism, of layers and of all."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing import assert_close

from tests.support.helpers import wrap
from tests.support.pairs.models import PLACES, RANKS, STEPS, batch, blocks, loss, part


def sharded(rank, mode, what, **how):
    """Gradients and weights of FSDP2 are shards of those of one process."""
    reference = blocks().double()
    model = wrap(copy.deepcopy(reference), PLACES, mode)
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
    steps_of_shards(rank, wrap(layers, PLACES, mode), reference, split=False)
