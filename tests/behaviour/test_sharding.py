"""Layers that FSDP2 has sharded, over one process that exchanges parameters as several do.

With two processes they are in ``tests/examples/test_data_parallel.py``.
"""

from functools import partial

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchgpipe import GPipe


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def layers():
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 3)) for _ in range(4)]
    ).double()


def sharded(module, mesh, mode="except_last", **how):
    for layer in module:
        fully_shard(layer, mesh=mesh, **how)
    return GPipe(module, [2, 2], devices=["cpu"] * 2, chunks=3, checkpoint=mode)


@pytest.mark.parametrize("when", ["before", "after"])
def test_on_several_devices(when, mesh):
    """FSDP2 knows one device of each process, so several are an error."""
    module = layers()
    wrap = partial(GPipe, balance=[2, 2], devices=["cpu", "meta"])
    if when == "before":
        fully_shard(module[1], mesh=mesh)
    with pytest.raises(ValueError, match=r"fully_shard.*layer: .*1, devices: \['cpu', 'meta'\]"):
        model = wrap(module)
        fully_shard(model[1], mesh=mesh)
        model(torch.rand(2, 3).double())


def test_parameters_changed_before_backward(mesh):
    model = sharded(layers(), mesh, "always", reshard_after_forward=True)
    loss = model(torch.rand(4, 3).double()).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="parameters must not be changed in place"):
        loss.backward()
