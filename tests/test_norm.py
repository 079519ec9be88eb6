"""Running statistics under recomputation."""

import pytest
import torch
from torch import nn

from torchgpipe.norm import statistics_kept

NORMS = {
    "BatchNorm1d": lambda **kw: nn.BatchNorm1d(3, **kw),
    "BatchNorm2d": lambda **kw: nn.BatchNorm2d(3, **kw),
    "InstanceNorm1d": lambda **kw: nn.InstanceNorm1d(3, track_running_stats=True, **kw),
}


def input(norm, device):
    return torch.rand(4, 3, *[5] * {"1": 1, "2": 2}[type(norm).__name__[-2]], device=device)


def saved(function):
    """What autograd saves, tensor by tensor."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x.shape), lambda x: x):
        output = function()
    return output, found


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_kept(name, affine, momentum, device):
    norm = NORMS[name](affine=affine, momentum=momentum).to(device)
    x = input(norm, device).requires_grad_()
    first, saved_first = saved(lambda: norm(x))
    buffers = dict(norm.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    with statistics_kept(nn.Sequential(norm)):
        second, saved_second = saved(lambda: norm(x))
    assert torch.equal(first, second)
    assert saved_first == saved_second
    for name, buffer in norm.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name]), name


def test_kept_after_an_exception():
    norm = nn.BatchNorm1d(3)
    buffers = dict(norm._buffers)
    with pytest.raises(KeyError), statistics_kept(norm):
        norm(torch.rand(2, 3))
        raise KeyError
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())


def test_others_are_left_as_they_are():
    norms = nn.Sequential(
        nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)
    )
    buffers = [dict(norm._buffers) for norm in norms]
    with statistics_kept(norms):
        assert [dict(norm._buffers) for norm in norms] == buffers
        norms(torch.rand(2, 3))
