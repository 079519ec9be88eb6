"""A device map is the user's own, that of Accelerate, or one that is measured."""

import copy
from collections import UserDict
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import note_of
from torchgpipe import GPipe, MappedGPipe, NoChunk
from torchgpipe.devices.streams import accelerators
from torchgpipe.mapped import hugging_face
from torchgpipe.planner import given, maps
from torchgpipe.planner.blocks import timed

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.rows = []

    def forward(self, x, shift=None):
        self.rows.append(len(x))
        x = self.dropout(self.second(self.first(x)))
        return self.norm(x if shift is None else x + shift)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))


def auto(model, sample):
    return MappedGPipe(model, "auto", sample=sample, devices=["cpu"] * 2)


X, SHIFT = torch.rand(2, 3), torch.rand(2, 3)


@pytest.mark.parametrize(
    "sample",
    [
        X,
        (X,),
        (X, SHIFT),
        (X, NoChunk(torch.rand(3))),
        {"x": X, "shift": SHIFT},
        UserDict(x=X),
    ],
    ids=["tensor", "one", "two", "whole", "keywords", "mapping"],
)
def test_samples(sample):
    pipe = auto(Model(), sample)
    assert pipe.device_map == dict.fromkeys(["", "first", "second", "norm"], CPU)
    assert set(pipe.module.rows) == {2}
    pipe.chunks = 2
    pipe(torch.rand(4, 3)).sum().backward()


def test_a_model_that_is_measured_does_not_change():
    model = Model().eval()
    model.first.train()
    model.first.weight.grad = torch.ones(3, 3)
    before = copy.deepcopy(model)
    parameters = {x: x.grad for x in model.parameters()}
    state = torch.random.get_rng_state()
    auto(model, X)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [x.training for x in model.modules()] == [x.training for x in before.modules()]
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    for own, (same, grad) in zip(model.parameters(), parameters.items(), strict=True):
        assert own is same
        assert own.grad is grad
    assert torch.equal(model.first.weight.grad, torch.ones(3, 3))


def test_all_accelerators_by_default(monkeypatch):
    monkeypatch.setattr(given, "accelerators", lambda: [CPU, CPU, CPU])
    names = ["first", "second", "norm"]
    found = maps.chosen_map(Model(), "auto", X)
    assert found == dict.fromkeys(["", *names], CPU)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MappedGPipe(Model(), chunks=2),
        lambda: MappedGPipe(Model(), "auto", sample=X, chunks=2),
        lambda: GPipe(nn.Sequential(nn.Linear(3, 3)), "auto", sample=X),
    ],
    ids=["dispatched", "map", "balance"],
)
def test_a_machine_without_accelerators(make, monkeypatch):
    """A program for several accelerators runs on a laptop, too, and warns of it."""
    for module in (given, hugging_face):
        monkeypatch.setattr(module, "accelerators", list)
    with pytest.warns(UserWarning, match=r"on the CPU alone.*\(model: ") as seen:
        pipe = make()
    assert len(seen) == 1
    assert {*pipe.hf_device_map.values()} == {CPU}
    pipe(X.repeat(2, 1)).sum().backward()


@pytest.mark.skipif(not accelerators(), reason="there is no accelerator")
def test_accelerators_of_this_machine(monkeypatch):
    device, *_ = few = accelerators()[:2]
    monkeypatch.setattr(given, "accelerators", lambda: few)
    model = MappedGPipe(Model().to(device), "auto", sample={"x": X, "shift": SHIFT})
    assert set(model.device_map.values()) <= {*few}


@pytest.mark.parametrize("given", ["sample", "devices", "memory"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=str)
def test_samples_and_devices_beside_a_map(device_map, given):
    kind = type(device_map).__name__
    with pytest.raises(ValueError, match=rf"device_map: {kind}, given: {given}\); leave them out"):
        MappedGPipe(Model(), device_map, **{given: [X]})


@pytest.mark.parametrize(
    ("sample", "devices", "error", "message"),
    [
        (None, ["cpu"], ValueError, "needs a sample .*as many rows as a micro-batch"),
        ([X], ["cpu"], TypeError, r"a sample is .*sample: list.*\); pass .* as \(argument,\)"),
        (X, "cpu", TypeError, "devices must be a sequence"),
        (X, 0, TypeError, "devices must be a sequence"),
        (X, [], ValueError, "one or more accelerators, or other devices"),
        (X, ["nothing"], ValueError, "devices must be the CPU or accelerators"),
    ],
)
def test_wrong_arguments(sample, devices, error, message):
    with pytest.raises(error, match=message):
        MappedGPipe(Model(), "auto", sample=sample, devices=devices)


def test_a_sample_that_the_model_does_not_take():
    model = Model()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        auto(model, torch.rand(2, 7))
    assert note_of(caught.value) == "raised by the sample of the device map 'auto'"
    assert not model.first._forward_hooks


def test_wrong_options_are_told_before_the_model_is_measured():
    model = Model()
    with pytest.raises(ValueError, match="chunks"):
        MappedGPipe(model, "auto", sample=X, devices=["cpu"], chunks=0)
    assert model.rows == []


def test_a_model_on_the_meta_device():
    with pytest.raises(ValueError, match=r"first.weight: meta\); load the model first"):
        auto(Model().to("meta"), X)
