"""A balance is the user's own, or one that is planned."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.support.helpers import note_of
from tests.support.skips import Pop, Stash
from torchgpipe import GPipe, NoChunk, Offload, arguments
from torchgpipe.partition.arguments import MISSING
from torchgpipe.planner import auto as choice
from torchgpipe.planner import proving as proof
from torchgpipe.planner.problem import Problem

# Layers that are as small as these may well be fastest in one piece.
pytestmark = pytest.mark.filterwarnings("ignore:GPipe leaves devices idle")

X = torch.rand(8, 3)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(choice, "Problem", partial(Problem, timeout=0))


def layers(count=4):
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(count)])


def auto(module=None, sample=X, devices=("cpu", "cpu"), **options):
    return GPipe(module or layers(), "auto", sample=sample, devices=devices, **options)


def test_balance_chunks_and_checkpoint():
    model = auto()
    assert len(model.balance) == 2
    assert sum(model.balance) == 4
    assert model.devices == [torch.device("cpu")] * 2
    assert model.chunks in (1, 2, 4, 8)
    # There is no limit for the CPU's memory.
    assert model.checkpoint == "never"
    model(X).sum().backward()
    assert all(x.grad is not None for x in model.parameters())


@pytest.mark.parametrize("checkpoint", ["always", ["never", "always"], MISSING], ids=str)
@pytest.mark.parametrize("chunks", [4, 100, MISSING], ids=str)
def test_what_is_given_is_kept(chunks, checkpoint):
    model = auto(chunks=chunks, checkpoint=checkpoint)
    assert chunks is MISSING or model.chunks == chunks
    assert model.checkpoint == ("never" if checkpoint is MISSING else checkpoint)


class Scale(nn.Module):
    def forward(self, x, scale, *, offset=0):
        return x * scale + offset


@pytest.mark.parametrize(
    "sample",
    [
        (X, NoChunk(torch.rand(3))),
        {"x": X, "scale": 2.0},
        arguments(X, 2.0, offset=torch.rand(8, 1)),
    ],
    ids=["tuple", "keywords", "arguments"],
)
def test_samples(sample):
    assert sum(auto(nn.Sequential(Scale(), *layers()), sample).balance) == 5


def test_skips():
    model = auto(nn.Sequential(Stash(), *layers(), Pop()), chunks=2)
    assert sum(model.balance) == 6
    model(X).sum().backward()


def test_layers_do_not_change():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3))
    before = copy.deepcopy(module)
    own, state = [*module.parameters()], torch.random.get_rng_state()
    with pytest.warns(UserWarning, match="batch normalisations see micro-batches"):
        model = auto(module)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(model.module.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert all(x is y and x.grad is None for x, y in zip(own, model.parameters(), strict=True))


def test_without_a_sample():
    with pytest.raises(TypeError, match=r"'auto' needs a sample .*sample: None\); pass the arg"):
        auto(sample=None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample": [X]}, TypeError, r"a sample is .*sample: list.*\); pass .* as \(argument,\)"),
        ({"devices": "cpu"}, TypeError, "devices must be a sequence"),
        ({"devices": []}, ValueError, r"one or more accelerators.*\['cpu'\] \* 4"),
        ({"chunks": 0}, ValueError, "chunks must be a positive integer"),
        ({"checkpoint": "ever"}, ValueError, "checkpoint must be one of"),
        ({"checkpoint": ["never"]}, ValueError, r"checkpoint: \['never'\], partitions: 2"),
    ],
)
def test_wrong_arguments(options, error, message, monkeypatch):
    # Nothing is measured before.
    monkeypatch.setattr(choice, "Problem", None)
    with pytest.raises(error, match=message):
        auto(**options)


@pytest.mark.parametrize("mode", ["offload", Offload(share=0.5), ["never", "offload"]], ids=str)
def test_modes_that_send_cells_to_the_host(mode):
    assert auto(checkpoint=mode).checkpoint == mode


def test_a_policy_counts_as_never(monkeypatch):
    policy = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    asked = []

    def search(problem, *options):
        asked.append(problem.modes)
        return choice_search(problem, *options)

    choice_search = proof.search
    monkeypatch.setattr(proof, "search", search)
    for mode in (policy, ["never", policy]):
        model = auto(checkpoint=mode)
        assert model.checkpoint == mode
    assert asked == [("never", "never")] * 2


def test_a_sample_beside_a_balance():
    with pytest.raises(ValueError, match=r"balance: list, given: sample\); leave it out"):
        GPipe(layers(), [2, 2], sample=X)


def test_a_sample_that_the_layers_do_not_take():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        auto(sample=torch.rand(2, 7))
    assert note_of(caught.value) == "raised while layer 0 (Linear) was profiled"
