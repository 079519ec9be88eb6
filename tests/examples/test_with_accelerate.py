"""Accelerate leaves a GPipe on its devices, and trains it as a plain loop does."""

import pytest
import torch
from torch import nn

from tests.examples import MISSING
from torchgpipe import GPipe

pytest.importorskip("accelerate", exc_type=MISSING)

from accelerate import Accelerator
from accelerate.state import AcceleratorState

from examples import ball, with_accelerate


@pytest.fixture(autouse=True)
def fresh():
    """Reset Accelerate, since the first Accelerator of a process sets the precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def model(*balance, devices=None):
    layers = [nn.Linear(4, 4) for _ in range(sum(balance))]
    return GPipe(nn.Sequential(*layers), balance, devices=devices or ["cpu"] * len(balance))


@pytest.mark.parametrize("options", [[], ["--accumulate", "5"], ["--precision", "bf16"]], ids=str)
def test_main(options, capsys, monkeypatch):
    # Eleven mini-batches, which neither two nor five divide.
    few = ball.loader(11 * 32)
    for module in (ball, with_accelerate):
        monkeypatch.setattr(module, "loader", lambda *_: few)
    assert with_accelerate.main(["--epochs", "2", *options]) == 0
    assert "As in a plain loop" in capsys.readouterr().out


def test_model_stays_where_it_is(accelerator):
    # A device that all others can be moved to, but not back.
    wrapped = model(1, 1, devices=["meta", "cpu"])
    parent = nn.ModuleDict({"pipe": model(2, devices=["meta"])})
    assert accelerator.prepare(wrapped) is wrapped
    assert accelerator.prepare(parent) is parent
    assert [p.device.type for p in wrapped.parameters()] == ["meta"] * 2 + ["cpu"] * 2
    assert {p.device.type for p in parent.parameters()} == {"meta"}


def test_one_layer(accelerator):
    with pytest.raises(TypeError, match="cannot be moved"):
        accelerator.prepare(model(1))
    wrapped = model(1)
    assert accelerator.prepare(wrapped, device_placement=[False]) is wrapped


def test_without_the_map(accelerator, monkeypatch):
    monkeypatch.delattr(GPipe, "hf_device_map")
    with pytest.raises(TypeError, match="cannot be moved"):
        accelerator.prepare(model(1, 1))


def test_state_of_tied_weights(accelerator, tmp_path):
    def tied():
        wrapped = model(1, 1, 1)
        wrapped[2].weight = wrapped[0].weight
        optimizer = torch.optim.Adam(wrapped.parameters())
        return accelerator.prepare(GPipe(wrapped.module, [1, 2], devices=["cpu"] * 2), optimizer)

    first, optimizer = tied()
    accelerator.backward(first(torch.rand(3, 4)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path)
    saved = {name: x.clone() for name, x in first.state_dict().items()}
    second = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    second[2].weight = second[0].weight
    other = Accelerator(cpu=True)
    wrapped = GPipe(second, [1, 1, 1], devices=["cpu"] * 3)
    wrapped, loaded = other.prepare(wrapped, torch.optim.Adam(wrapped.parameters()))
    other.load_state(tmp_path)
    for (name, mine), theirs in zip(wrapped.state_dict().items(), saved.values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert len(loaded.state) == len(optimizer.state)
