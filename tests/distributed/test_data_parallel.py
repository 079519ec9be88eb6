"""Pipelines beside each other: their layers are sharded by FSDP2, or their gradients averaged."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tests.distributed.test_schedules import beside, pipe_of
from tests.support.schedules import tokens


def layer():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()


def shard(group, name, mode, weighted):
    """Check two pipelines of two processes against one process with the joined mini-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "pipeline"))
    torch.manual_seed(0)
    layers = [layer() for _ in range(2 if name in ("1f1b", "zbh1") else 4)]
    loss = tokens if weighted else F.mse_loss
    one, training = beside(layers)
    own = mesh["pipeline"].get_group()
    pipe = pipe_of(layers, name, own, loss=loss, chunks=4, checkpoint=mode)
    for child in pipe.children():
        fully_shard(child, mesh=mesh["replicas"])
    optimizers = [torch.optim.AdamW(x.parameters(), 0.01) for x in (one, pipe)]
    replica = mesh.get_local_rank("replicas")
    for step in range(3):
        x, y = torch.randn(2, 16, 6).double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Two steps that add up.
        for _ in range(1 + (step == 2)):
            training(x, y).backward()
            terms = (y.chunk(2)[replica], torch.ones(8, 1).double())
            pipe.step(x.chunk(2)[replica], *terms[: 1 + weighted])
        for key, parameter in pipe.named_parameters():
            expected = one.module.get_parameter(key).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)
        for optimizer in optimizers:
            optimizer.step()
        pipe.eval()
        output = pipe(x)
        if pipe.is_last:
            torch.testing.assert_close(output, one(x).detach())
        pipe.train()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["except_last", "never"])
@pytest.mark.parametrize("name", ["1f1b", "zbh1", "zbv"])
def test_fsdp(name, mode, weighted, processes):
    processes.run(shard, 4, name, mode, weighted)


def replicate(group, name):
    """Check two pipelines whose gradients are averaged, against one with the joined mini-batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "pipeline"))
    torch.manual_seed(0)
    layers = [layer() for _ in range(2)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    replica = mesh.get_local_rank("replicas")
    groups = {x: mesh[x].get_group() for x in mesh.mesh_dim_names}
    pipe = pipe_of(layers, name, groups["pipeline"], chunks=2, replicas=groups["replicas"])
    for _ in range(2):
        x, y = torch.randn(2, 8, 6).double()
        F.mse_loss(plain(x), y).backward()
        pipe.step(x.chunk(2)[replica], y.chunk(2)[replica])
    for key, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(key).grad)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_replicas(name, processes):
    processes.run(replicate, 4, name)


def wrapped(group):
    layers = [layer(), torch.nn.parallel.DistributedDataParallel(layer(), process_group=group)]
    with pytest.raises(TypeError, match=r"DistributedDataParallel.*layer: 1\); pass.*replicas"):
        pipe_of(layers, "1f1b", group)


def test_layer_in_ddp(processes):
    processes.run(wrapped, 2)


def clip(group, name, norm_type, shared):
    """Check clipping against that of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "pipeline"))
    layers = [layer() for _ in range(2)]
    if shared == "tied":
        layers[1][0] = layers[0][0]
    plain = nn.Sequential(*copy.deepcopy(layers))
    pipe = pipe_of(layers, name, mesh["pipeline"].get_group())
    if shared == "sharded":
        for child in pipe.children():
            fully_shard(child, mesh=mesh["replicas"])
    x, y = torch.randn(2, 8, 6).double()
    F.mse_loss(plain(x), y).backward()
    pipe.step(x, y)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1, norm_type), expected)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    for key, parameter in pipe.named_parameters():
        grad = parameter.grad.full_tensor() if shared == "sharded" else parameter.grad
        torch.testing.assert_close(grad, parameters[key].grad)


@pytest.mark.parametrize("norm_type", [2.0, float("inf"), 1.0])
@pytest.mark.parametrize("shared", ["", "tied", "sharded"])
def test_clipping(norm_type, shared, processes):
    processes.run(clip, 4, "1f1b", norm_type, shared)
