"""Cells of a process of several whose saved tensors are in the memory of the host.

Its group has no other process, since gloo knows no virtual accelerators.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.distributed.processes import OLD
from tests.support.helpers import assert_no_races
from tests.support.offload import Attention
from torchgpipe import Offload
from torchgpipe.engine.loop import Executor
from torchgpipe.engine.step_plan import plan
from torchgpipe.schedule import Op, Schedule
from torchgpipe.testing import observe

M = 5


@pytest.fixture(scope="module")
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def over_the_host(monkeypatch):
    """Have messages pass through the memory of the host."""
    broadcast = dist.broadcast

    def through(x, **options):
        found = x.cpu()
        broadcast(found, **options)
        x.copy_(found)

    monkeypatch.setattr(dist, "broadcast", through)


def trained(group, device, mode, jitter=None):
    """The gradients of the second of two steps, its peak, and what was observed in it."""
    from torchgpipe.distributed import Pipe

    torch.manual_seed(0)
    layers = nn.Sequential(Attention(), Attention())
    options = {"loss": F.mse_loss, "schedule": drained, "chunks": M, "checkpoint": mode}
    model = Pipe(layers, [1, 1], group=group, device=device, **options)
    for _ in range(2):
        model.zero_grad()
        x, y = torch.rand(2, 2 * M, 16, 32, device=device)
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        with observe(jitter=jitter) as seen:
            model.step(x, y)
    assert_no_races(seen)
    peak = torch.accelerator.max_memory_allocated(device) - before
    return [x.grad.cpu() for x in model.parameters()], peak, seen


def drained(workers, m):
    """All of the first stage, of the second one, and back again."""
    forward = [Op(j, "F", i) for j in range(2) for i in range(m)]
    backward = [Op(j, "B", i) for j in (1, 0) for i in range(m)]
    return Schedule((0, 0), m, ((*forward, *backward),))


@pytest.mark.skipif(bool(OLD), reason=OLD)
def test_gradients_are_the_same_bit_by_bit(group, devices, monkeypatch):
    performed = []
    begin = Executor.begin

    def noting(self, w, instruction):
        performed.append(instruction)
        return begin(self, w, instruction)

    expected, most, _ = trained(group, devices[0], "never")
    monkeypatch.setattr(Executor, "begin", noting)
    for mode in ("offload", Offload(share=0.5), ["offload", "never"]):
        performed.clear()
        found, peak, seen = trained(group, devices[0], mode, jitter=0)
        assert all(map(torch.equal, found, expected))
        assert peak < most
        assert seen.transfers[0, "cpu"].bytes > 0
        # The instructions of the process are those of its plan, before which cells come back.
        fetches = plan(drained, devices[:1] * 2, M, mode, [], forward=False).fetches
        assert fetches
        assert {*fetches} <= {*performed}
