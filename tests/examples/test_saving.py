"""A training stops and goes on elsewhere, with all that the example saves, and with less."""

import argparse

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.examples import MISSING

pytest.importorskip("safetensors", exc_type=MISSING)

from examples import saving

BALANCES = [[10], [1, 9], [3, 3, 2, 2]]
# PyTorch warns each time that there is no process group, which these tests do not need.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "places", lambda partitions: [torch.device("cpu")] * partitions)
        yield


def options(chunks=4):
    return argparse.Namespace(chunks=chunks, epochs=4)


@pytest.fixture(scope="module")
def points():
    """A part of the data."""
    return tuple(tensor[:192] for tensor in saving.data())


@pytest.fixture(scope="module")
def whole(points):
    """A training that never stops, and its losses."""
    training = saving.Training([2, 8], options(), seed=0)
    return training, training.run(4, *points)


def test_example(capsys):
    assert saving.main(["--epochs", "2", "--chunks", "2"]) == 0
    assert "Not as it should be" not in capsys.readouterr().out


@pytest.mark.parametrize("target", BALANCES, ids=str)
@pytest.mark.parametrize("way", saving.WAYS)
def test_goes_on_bit_for_bit(way, target, whole, points, tmp_path):
    save, load = saving.WAYS[way]
    before = saving.Training([3, 3, 2, 2], options(), seed=0)
    losses = before.run(2, *points)
    save(tmp_path, before)
    after = saving.Training(target, options(), seed=1)
    load(tmp_path, after)
    reference, expected = whole
    assert losses + after.run(4, *points) == expected
    # The last step has changed state that no loss shows yet.
    weights = reference.model.module.state_dict()
    for name, x in after.model.module.state_dict().items():
        assert torch.equal(x, weights[name]), name
    for key in ("scaler", "schedule", "epoch"):
        assert after.rest()[key] == reference.rest()[key]
    assert after.scaler.get_scale() > 2.0**16, "it has grown"


def test_the_plain_model_goes_on(points, tmp_path):
    """Losses are equal bit for bit without micro-batches, when dropout draws the same numbers."""
    before = saving.Training([3, 3, 2, 2], options(chunks=1), seed=0)
    before.run(2, *points)
    saving.save_one_file(tmp_path, before)
    expected = before.run(4, *points)
    after = saving.Training([10], options(), seed=1)
    after.model = saving.layers()
    after.model.devices = [torch.device("cpu")]
    after.optimizer = torch.optim.AdamW(after.model.parameters())
    after.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(after.optimizer, 4)
    saving.load_one_file(tmp_path, after)
    assert after.run(4, *points) == expected


def test_a_file_is_missing(tmp_path):
    training = saving.Training([3, 3, 2, 2], options(), seed=0)
    saving.save_partitions(tmp_path, training)
    (tmp_path / "weights-1.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"no file has \['partitions\.1\.5\.bias', 'partitions\.1\.5\.weight'\]"
    ):
        saving.load_partitions(tmp_path, saving.Training([5, 5], options(), seed=1))


def tied():
    """The weight that comes last in the alphabet comes first in the model."""
    embedding, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = embedding.weight
    module = nn.Sequential()
    for name, layer in {"embedding": embedding, "gelu": nn.GELU(), "a": head}.items():
        module.add_module(name, layer)
    return module


@pytest.mark.parametrize("target", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_tied_weights_in_safetensors(target, tmp_path):
    """safetensors keeps one name of a shared tensor, which must be the plain model's."""
    from safetensors.torch import load_file, load_model, save_file, save_model

    source = saving.GPipe(tied(), [2, 1], devices=["cpu"] * 2)
    file = str(tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="save_model"):
        save_file(source.module.state_dict(), file)
    save_model(source.module, file)
    assert "embedding.weight" not in load_file(file)
    load_model(tied(), file)

    model = saving.GPipe(tied(), target, devices=["cpu"] * len(target))
    if len(target) > 1:
        # It looks for the name that is first in the alphabet, where partitions come first.
        with pytest.raises(RuntimeError, match=r"Missing key.*embedding\.weight"):
            load_model(model, file)
    assert load_model(model.module, file) == (set(), [])
    assert model[0].weight is model[2].weight
    for one, other in zip(source.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    F.mse_loss(model(torch.rand(2, 4)), torch.rand(2, 4)).backward()
    assert model[0].weight.grad is model[2].weight.grad
