"""The base of the wrappers: their settings, and what belongs to one object alone."""

import ast
import copy
import os
from collections import UserList
from pathlib import Path

import pytest
import torch
from torch import nn

import torchgpipe
from tests.support.helpers import linears
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.engine.stages import stages_of
from torchgpipe.engine.wrapper import MiniBatch

MIXED = ["always", "never", "except_last"]


def wrap(checkpoint="except_last"):
    return GPipe(linears(1, 1, 1, 1), [1] * 3, devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)


def mapped(checkpoint="except_last", device_map=None, **more):
    layers = linears(1, 1, 1)
    where = device_map or {"0": "cpu", "1": "cpu"}
    return MappedGPipe(layers, where, chunks=2, checkpoint=checkpoint, **more)


@pytest.mark.parametrize("kind", [list, tuple, UserList])
def test_a_mode_for_each_partition(kind):
    model = wrap(kind(MIXED))
    assert model.checkpoint == MIXED
    assert type(model.checkpoint) is list
    model.checkpoint = kind(MIXED[::-1])
    assert model.checkpoint == MIXED[::-1]
    model.checkpoint = "never"
    assert model.checkpoint == "never"


def test_lists_are_the_users():
    given = [*MIXED]
    model = wrap(given)
    given.clear()
    model.checkpoint.clear()
    assert model.checkpoint == MIXED


def test_words_of_another_class():
    class Mode:
        def __str__(self):
            return "always"

    assert wrap([Mode(), "never", "never"]).checkpoint == ["always", "never", "never"]


@pytest.mark.parametrize("modes", [[], ["never"], ["never"] * 4])
def test_wrong_length(modes):
    model = wrap(MIXED)
    for change in (lambda: wrap(modes), lambda: setattr(model, "checkpoint", modes)):
        with pytest.raises(
            ValueError,
            match=r"one for each partition.* \(checkpoint: \[.*partitions: 3\).*one word",
        ):
            change()
    assert model.checkpoint == MIXED


@pytest.mark.parametrize("modes", [{"never"}, {"never": 1}, 3])
def test_what_has_no_order_is_no_list(modes):
    with pytest.raises(ValueError, match=r"one of 'always'"):
        wrap(modes)


def test_a_device_map_has_a_mode_for_each_entry():
    model = mapped(["never", "always"])
    assert model.checkpoint == ["never", "always"]
    model.checkpoint = ("offload", "never")
    with pytest.raises(ValueError, match=r"each entry of a device map .*partitions: 2"):
        model.checkpoint = ("never",)
    assert model.checkpoint == ["offload", "never"]
    assert [row.checkpoint for row in model.describe().rows] == ["offload, never"]


def test_a_map_that_is_measured_has_one_mode_until_it_is_there():
    sample = torch.rand(2, 2)
    with pytest.raises(ValueError, match=r"one checkpoint mode for all.*\['never'\].*device_map"):
        mapped(["never"], "auto", sample=sample, devices=["cpu"])


@pytest.mark.parametrize("make", [wrap, mapped, lambda: ScheduledLoss(wrap(), nn.MSELoss())])
def test_what_belongs_to_one_object_alone(make):
    model = make()
    own = {*type(model)._own}
    assert own <= {*model.__dict__}
    assert not own & {*model.__getstate__()}
    twin = copy.deepcopy(model)
    assert own <= {*twin.__dict__}
    assert {*twin.__dict__} == {*model.__dict__}


@pytest.mark.parametrize("make", [wrap, mapped])
def test_another_process_makes_its_own(make, monkeypatch):
    model = make()
    before, _ = model._traced()
    MiniBatch(model, torch.rand(2, 1))
    assert model._traced()[0] is before
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    MiniBatch(model, torch.rand(2, 1))
    assert model._traced()[0] is not before


def test_a_model_in_a_scheduled_loss_is_one_with_the_same_stages():
    model = wrap()
    training = ScheduledLoss(model, nn.MSELoss())
    assert training._traced()[0] is model._traced()[0] is stages_of(model)


@pytest.mark.parametrize(
    ("file", "allowed"),
    # What can be traced has this for whoever traces it.
    [("scheduled", []), ("plans", []), ("tracing", ["wrapper._traced"]), ("planner/observed", [])],
)
def test_nobody_reaches_into_a_wrapper(file, allowed):
    """A schedule, a plan and an advisor take what they need from stages and mini-batches."""
    tree = ast.parse((Path(torchgpipe.__file__).parent / f"{file}.py").read_text())
    found = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("model", "wrapper", "gpipe")
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    ]
    assert found == allowed


WRAPS = {
    "GPipe": lambda inner: GPipe(nn.Sequential(inner), [1], devices=["cpu"], chunks=2),
    "MappedGPipe": lambda inner: MappedGPipe(nn.Sequential(inner), {"": "cpu"}, chunks=2),
    "ScheduledLoss": lambda inner: ScheduledLoss(
        GPipe(linears(1, 1), [1], devices=["cpu"], chunks=2), lambda x: inner(x).mean()
    ),
}


@pytest.mark.parametrize("kind", WRAPS)
@pytest.mark.parametrize("inner", [wrap, mapped])
def test_a_wrapper_within_a_layer_or_a_loss_is_an_error(kind, inner):
    within = inner()
    model = WRAPS[kind](within)
    message = rf"must not be called by a layer.*\(called: {type(within).__name__}\); give the"
    with pytest.raises(RuntimeError, match=message):
        model(torch.rand(4, 1))
    # By itself it is as it was.
    assert within(torch.rand(4, 1)).shape == (4, 1)
