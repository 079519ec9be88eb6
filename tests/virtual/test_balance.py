"""Balancing by time on virtual accelerators, where only what has a cost takes time."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races
from torchgpipe import MappedGPipe
from torchgpipe.balance import balance_by_size, balance_by_time, map_by_time
from torchgpipe.balance.profile import profile_layers
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import timed
from torchgpipe.testing import observe


def linears():
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])


def test_no_layer_takes_time(devices):
    x = torch.rand(2, 4)
    with pytest.raises(
        ValueError, match=r"device: virtual:0, times: 0 for all 8 layers.*costs=.*'cpu'$"
    ):
        balance_by_time(4, linears(), x, timeout=0)
    assert balance_by_time(4, linears(), x, timeout=0.1, device="cpu") is not None
    assert balance_by_size(4, linears(), x) == [2, 2, 2, 2]


def test_layers_with_costs(devices):
    """The remedy that the error names."""
    with observe(costs={"addmm": 1.0, "mm": 1.0}):
        assert balance_by_time(4, linears(), torch.rand(2, 4), timeout=0) == [2, 2, 2, 2]


def test_no_block_takes_time(devices, monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    model = linears().to(devices[0])
    x = torch.rand(2, 4, device=devices[0])
    message = r"device: virtual:0, times: 0 for all 8 blocks.*costs=.*to the CPU.*model.cpu"
    with pytest.raises(ValueError, match=message):
        map_by_time(devices[:4], model, x, timeout=0)
    with pytest.raises(ValueError, match=message):
        MappedGPipe(model, "auto", sample=x, devices=devices[:4], chunks=2)
    with observe(costs={"addmm": 1.0}):
        found = map_by_time(devices[:4], model, x, timeout=0)
        pipe = MappedGPipe(model, "auto", sample=x, devices=devices[:4], chunks=2)
    assert found == {"": devices[0], **{str(k): devices[k // 2] for k in range(8)}}
    assert pipe.device_map == found


def test_times_are_exact(devices):
    with observe(costs={"addmm": 1.0, "mm": 2.0}) as seen:
        table = profile_layers(linears(), torch.rand(2, 4), timeout=0)
    assert_no_races(seen)
    assert [x.at(2).forward for x in table.layers] == [1] * 8
    # The input of the first layer needs no gradient.
    assert table.times() == [0.003, *[0.005] * 7]
