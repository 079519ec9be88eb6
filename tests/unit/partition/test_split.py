"""Partitions: splitting, placing, and what is checked of them."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.conftest import DEVICES
from torchgpipe.partition.split import (
    groups,
    place,
    split_module,
    tensors,
    verify_module,
    verify_placement,
)

CPU = torch.device("cpu")


def test_layers_keep_their_names_and_order():
    module = nn.Sequential(OrderedDict(a=nn.Linear(1, 2), b=nn.ReLU(), c=nn.Linear(2, 1)))
    one, two = split_module(module, [1, 2])
    assert list(one._modules.items()) == [("a", module.a)]
    assert list(two._modules.items()) == [("b", module.b), ("c", module.c)]
    assert torch.equal(two(one(x := torch.rand(3, 1))), module(x))


def test_a_layer_that_comes_twice():
    relu = nn.ReLU()
    partitions = split_module(nn.Sequential(relu, nn.Linear(1, 1), relu), [2, 1])
    assert [len(partition) for partition in partitions] == [2, 1]


@pytest.mark.parametrize("training", [True, False])
def test_training_flag(training):
    module = nn.Sequential(nn.ReLU(), nn.ReLU()).train(training)
    assert [p.training for p in split_module(module, [1, 1])] == [training] * 2


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList(), [nn.Linear(1, 1)]])
def test_other_modules_are_an_error(module):
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential.*nn\.Sequential\(\*layers\)"):
        verify_module(module)


class Subclass(nn.Sequential):
    """As libraries derive them, to fill them in the constructor."""


class Forward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


def changed(change):
    module = nn.Sequential(nn.Linear(1, 1))
    change(module)
    return module


def test_subclasses_that_add_nothing_are_fine():
    verify_module(Subclass(nn.Linear(1, 1)))
    verify_module(nn.Sequential(Forward(nn.Linear(1, 1))))


@pytest.mark.parametrize(
    ("module", "own"),
    [
        (Forward(), "a forward"),
        (changed(lambda m: setattr(m, "forward", lambda x: x)), "a forward"),
        (changed(lambda m: m.register_parameter("p", nn.Parameter(torch.ones(1)))), "parameters"),
        (changed(lambda m: m.register_buffer("b", torch.ones(1))), "buffers"),
        (changed(lambda m: m.register_forward_hook(print)), "hooks"),
        (changed(lambda m: m.register_full_backward_hook(print)), "hooks"),
        (changed(lambda m: m.register_load_state_dict_post_hook(print)), "hooks"),
        (changed(lambda m: setattr(m, "_compiled_call_impl", print)), r"compile\(\)"),
    ],
)
def test_what_would_be_lost_is_an_error(module, own):
    with pytest.raises(TypeError, match=rf"own: {own}\); give it to a layer"):
        verify_module(module)


def test_placement():
    partitions = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.BatchNorm1d(2))]
    verify_placement(partitions, [CPU, CPU])
    partitions[1][0].running_var = partitions[1][0].running_var.to("meta")
    message = r"partition 1: cpu, 0\.running_var: meta.*move the tensor back"
    with pytest.raises(RuntimeError, match=message):
        verify_placement(partitions, [CPU, CPU])


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


def test_complex_tensors_of_the_meta_device_are_made():
    layer = nn.Module()
    layer.register_buffer("table", torch.empty(2, dtype=torch.cfloat, device="meta"))
    place([partition := nn.Sequential(layer)], [CPU])
    assert partition[0].table.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_mask_of_the_meta_device_that_nobody_loads(dtype):
    """Zeros would pass for it."""
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
    """Also where moving makes new tensors, as between the CPU and the meta device."""
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
    """A layer that may remember anything."""


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
