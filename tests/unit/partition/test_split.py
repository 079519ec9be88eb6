"""Partitions: how a module is split, and the checks of partitions."""

import pytest
import torch
from torch import nn

from torchgpipe.partition.split import own_key, rename, split_module, verify_module


def test_a_layer_that_comes_twice():
    relu = nn.ReLU()
    partitions = split_module(nn.Sequential(relu, nn.Linear(1, 1), relu), [2, 1])
    assert [len(partition) for partition in partitions] == [2, 1]


GPIPE = {"a": "partitions.0.", "partitions": "partitions.1."}
PIPE = {"a": "", "partitions": "", "b": None}


@pytest.mark.parametrize(
    ("key", "gpipe", "pipe"),
    [
        ("a.weight", "partitions.0.a.weight", "a.weight"),
        ("partitions.3.a.weight", "partitions.0.a.weight", "a.weight"),
        ("partitions.weight", "partitions.1.partitions.weight", "partitions.weight"),
        # A layer of this name that has layers itself.
        ("partitions.0.weight", "partitions.1.partitions.0.weight", "partitions.0.weight"),
        ("partitions.2.partitions.0.x", "partitions.1.partitions.0.x", "partitions.0.x"),
        ("a", "partitions.0.a", "a"),
        ("other.weight", "other.weight", "other.weight"),
        ("partitions.0", "partitions.1.partitions.0", "partitions.0"),
        ("", "", ""),
    ],
)
def test_own_keys(key, gpipe, pipe):
    assert own_key(key, GPIPE) == gpipe
    assert own_key(key, PIPE) == pipe
    assert own_key(key, {}) == key


def test_keys_of_other_processes_are_dropped():
    state = {"m.a.x": 1, "m.partitions.1.b.x": 2, "m.b.y": 3, "b.x": 4, "m.c": 5}
    rename(state, "m.", PIPE)
    assert state == {"m.a.x": 1, "b.x": 4, "m.c": 5}


def test_a_second_key_of_one_tensor_stays():
    state = {"a.x": 1, "partitions.1.a.x": 2}
    rename(state, "", GPIPE)
    assert state == {"partitions.0.a.x": 1, "partitions.1.a.x": 2}


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.ModuleList(), [nn.Linear(1, 1)]])
def test_other_modules_are_an_error(module):
    with pytest.raises(TypeError, match=r"must be an nn\.Sequential.*nn\.Sequential\(\*layers\)"):
        verify_module(module)


class Subclass(nn.Sequential):
    """A subclass as libraries derive it, which fills itself in the constructor."""


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
