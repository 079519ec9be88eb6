"""The wrapper denies to be moved, and can be copied."""

import copy
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS, linears
from torchgpipe import GPipe
from torchgpipe.ambient.context import Context
from torchgpipe.engine.workers import Task, Workers


@pytest.fixture
def model(device):
    return GPipe(linears(3, 4, 5, 2), [2, 1], devices=[device] * 2, chunks=2)


@pytest.fixture
def input(device):
    return torch.rand(5, 3, device=device)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.cuda(),
        lambda m: m.cuda(0),
        lambda m: m.cpu(),
        lambda m: m.to("cpu"),
        lambda m: m.to(0),
        lambda m: m.to(torch.device("meta")),
        lambda m: m.to(device="cpu", dtype=torch.float64),
        lambda m: m.to(torch.empty(1)),
        lambda m: m.to_empty(device="meta"),
        lambda m: nn.Sequential(m).to("meta"),
        lambda m: nn.ModuleDict({"x": m}).to("meta", torch.float64),
    ],
)
def test_moving_is_denied(move, model, device):
    with pytest.raises(TypeError, match="must stay on their devices"):
        move(model)
    for parameter in model.parameters():
        assert (parameter.device, parameter.dtype) == (device, torch.float32)


def test_every_device_is_asked():
    """A call that moves no tensor of one partition may move those of another."""
    model = GPipe(linears(1, 1, 1), [1, 1], devices=["meta", "cpu"])
    with pytest.raises(TypeError, match="must stay on their devices"):
        nn.Sequential(model).to("meta")


def test_meta_model_is_made_and_loaded(device, input):
    torch.manual_seed(0)
    module = linears(3, 4, 2).to(device)
    with torch.device("meta"):
        meta = linears(3, 4, 2)
    model = GPipe(meta, [1, 1], devices=[device] * 2)
    assert {p.device for p in model.parameters()} == {device}
    assert model(input).isnan().all(), "weights that were not loaded show"
    model.load_state_dict(module.state_dict())
    assert torch.equal(model(input), module(input))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_workers_and_streams_of_their_own(duplicate):
    model = GPipe(linears(1, 1), [1], devices=["cpu"])
    model._workers = Workers(CPUS)
    model._stages.workers.run([Task(k, device, list) for k, device in enumerate(CPUS)], Context())
    twin = duplicate(model)
    assert twin._workers is not model._workers
    assert twin._stages.pool is not model._stages.pool


def test_nothing_holds_a_wrapper():
    before = set(threading.enumerate())
    model = GPipe(linears(1, 1, 1), [1, 1], devices=["cpu"] * 2, chunks=2)
    model(torch.rand(2, 1)).sum().backward()
    model.module  # noqa: B018 - is made when it is asked for
    ref = weakref.ref(model)
    del model
    assert ref() is None
    assert set(threading.enumerate()) <= before
