"""Placement: partitions are moved to their devices."""

import pytest
import torch
from torch import nn

from tests.conftest import DEVICES
from torchgpipe.partition.placement import (
    groups,
    place,
    sharing,
    tables,
    tensors,
    verify_placement,
)

CPU = torch.device("cpu")


def test_placement():
    partitions = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.BatchNorm1d(2))]
    verify_placement(partitions, [CPU, CPU])
    partitions[1][0].running_var = partitions[1][0].running_var.to("meta")
    message = r"partition 1: cpu, 0\.running_var: meta.*move the tensor back"
    with pytest.raises(RuntimeError, match=message):
        verify_placement(partitions, [CPU, CPU])


def test_shared_tensors_stay_shared():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.weight = one.weight
    with sharing([*tables(one), *tables(other)]):
        for layer in (one, other):
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    assert one.weight is other.weight
    assert one.bias is not other.bias


def test_tensors_of_the_meta_device_are_made(device):
    with torch.device("meta"):
        layer = nn.BatchNorm1d(3)
        partition = nn.Sequential(layer, nn.Linear(3, 3), nn.Linear(3, 3))
    partition[2].weight = partition[1].weight
    partition[1].bias = kept = nn.Parameter(torch.ones(3, device=device))
    partition[2].bias.requires_grad_(False)
    place([partition], [device])
    for name, tensor in tensors(partition):
        assert tensor.device == device, name
        made = name not in ("1.bias", "0.num_batches_tracked")
        assert bool(tensor.isnan().any()) == made, name
    assert partition[1].bias is kept
    assert partition[2].weight is partition[1].weight
    assert isinstance(partition[1].weight, nn.Parameter)
    assert partition[1].weight.requires_grad
    assert not partition[2].bias.requires_grad
    assert layer.num_batches_tracked.item() == 0
    assert not isinstance(layer.running_mean, nn.Parameter)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_mask_of_the_meta_device_that_nobody_loads(dtype):
    """Zeros would pass for the mask."""
    layer = nn.Module()
    layer.register_buffer("mask", torch.ones(2, dtype=dtype, device="meta"), persistent=False)
    with pytest.raises(ValueError, match=rf"buffer: 0\.mask, {dtype}, on the meta.*on the CPU"):
        place([nn.Sequential(layer)], [CPU])
    place([nn.Sequential(layer)], [torch.device("meta")])
    layer.mask = torch.ones(2, dtype=dtype)
    place([nn.Sequential(layer)], [CPU])


@pytest.mark.parametrize("target", ["meta", *DEVICES], ids=str)
@pytest.mark.parametrize("source", ["cpu", "meta"])
def test_what_is_shared_stays_shared(source, target):
    """Sharing survives a move that makes new tensors, as between the CPU and the meta device."""
    one, two, three = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    two.weight = three.weight = one.weight
    two.running_mean = three.running_mean = one.running_mean
    partitions = [nn.Sequential(one, two).to(source), nn.Sequential(three).to(source)]
    for layer in (two, three):
        layer.weight, layer.running_mean = one.weight, one.running_mean
    place(partitions, [torch.device(target)] * 2)
    assert one.weight.device.type == torch.device(target).type
    assert one.weight is two.weight is three.weight
    assert one.running_mean is two.running_mean is three.running_mean
    assert one.bias is not two.bias


class Own(nn.Module):
    """A layer that remembers any attributes."""


def test_groups_are_of_partitions_that_share_layers_or_tensors():
    own, tied, act = Own(), nn.Linear(2, 2), nn.ReLU()
    tied_too = nn.Linear(2, 2)
    tied_too.weight = tied.weight
    parts = [
        nn.Sequential(nn.Linear(1, 1), act),
        nn.Sequential(own),
        nn.Sequential(tied, act),
        nn.Sequential(nn.Sequential(own), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(1, 1), act),
        nn.Sequential(tied_too, own),
    ]
    assert groups(parts[:5]) == [0, 1, 2, 1, 4]
    assert groups(parts) == [0, 1, 1, 1, 4, 1]
    assert groups([]) == []
