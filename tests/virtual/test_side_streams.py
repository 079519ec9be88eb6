"""Layers that compute on a stream of their own, beside that of their partition."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.support.helpers import assert_no_races, wrap
from tests.support.offload import WIDTH, Side
from torchgpipe import MappedGPipe, ScheduledLoss
from torchgpipe.devices.streams import current_stream
from torchgpipe.testing import observe

M = 4


class SideAtLast(nn.Module):
    """A layer that at last, and on its own stream, saves what is not computed again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x):
        side, own = torch.Stream(x.device), current_stream(x.device)
        y = x.sin()
        side.wait_stream(own)
        with side:
            z = y.exp() * self.scale
        y.record_stream(side)
        own.wait_stream(side)
        z.record_stream(own)
        return z


def squares(y):
    return y.pow(2).sum()


def of_gpipe(layers, devices, mode):
    return wrap(layers, devices, mode, M, balance=[4, 4])


def of_schedule(layers, devices, mode, name="1f1b"):
    return ScheduledLoss(of_gpipe(layers, devices, mode), squares, name)


def of_map(layers, devices, mode):
    where = {name: devices[k // 4] for k, name in enumerate(layers._modules)}
    return MappedGPipe(layers, where, chunks=M, checkpoint=mode)


WRAPPERS = {
    "GPipe": of_gpipe,
    "1f1b": of_schedule,
    "zbh1": partial(of_schedule, name="zbh1"),
    "MappedGPipe": of_map,
}
POLICY = partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
MODES = {"always": "always", "except_last": "except_last", "offload": "offload", "policy": POLICY}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("layer", [Side, SideAtLast])
def test_what_is_computed_again_is_there(devices, layer, wrapper, mode):
    """A node on such a stream waits for the recomputation, whose memory stays until it is done."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[x for _ in range(4) for x in (nn.Linear(WIDTH, WIDTH), layer())])
    grads = []
    for kept in ("never", MODES[mode]):
        model = WRAPPERS[wrapper](copy.deepcopy(layers), devices[:2], kept)
        for k in range(2):
            model.zero_grad()
            torch.manual_seed(k)
            x = torch.rand(4 * M, WIDTH, device=devices[0])
            with observe(jitter=k) as seen:
                y = model(x)
                (y if isinstance(model, ScheduledLoss) else squares(y)).backward()
            assert_no_races(seen)
        grads.append([x.grad.cpu() for x in model.parameters()])
    assert all(map(torch.equal, *grads))
