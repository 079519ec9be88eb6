"""A pipeline over two processes, with messages over NCCL, has the plain model's step."""

import socket

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.processes import OLD

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs"),
    pytest.mark.skipif(bool(OLD), reason=OLD),
]


def step(rank, port, kind, backend):
    """Train a step in one of two processes, and compare the gradients of its stage."""
    from torchgpipe.distributed import Pipe

    if kind == "cuda":
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(backend, address, rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    x, y = torch.rand(2, 8, 8)
    F.mse_loss(layers(x), y).backward()
    wanted = [x.grad.clone() for x in layers[2 * rank : 2 * rank + 2].parameters()]
    layers.zero_grad()
    pipe = Pipe(layers, [2, 2], loss=F.mse_loss, schedule="1f1b", chunks=4)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(x.to(pipe.device), y.to(pipe.device))
    found = [p.grad.cpu() for p in pipe.parameters()]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    torch.distributed.destroy_process_group()


def test_pipe_over_nccl():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(step, (port, "cuda", "cpu:gloo,cuda:nccl"), nprocs=2)
