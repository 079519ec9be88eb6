"""The arguments of the wrapper: balance, devices, chunks and checkpoint."""

from fractions import Fraction

import pytest
import torch
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe
from torchgpipe.partition import arguments as options


@pytest.mark.parametrize("balance", [[0, 3], [-1, 4], [1.5, 1.5], [True, 2], ["3"], [None]])
def test_balance_of_other_numbers(balance):
    with pytest.raises(ValueError, match=r"must be positive integers.*balance: \["):
        GPipe(linears(1, 1, 1, 1), balance)


@pytest.mark.parametrize("balance", [[], [1], [2, 2]])
def test_balance_that_does_not_add_up(balance):
    with pytest.raises(ValueError, match=rf"sum: {sum(balance)}, layers: 3.*every layer"):
        GPipe(linears(1, 1, 1, 1), balance)


def test_checkpoint_of_another_class():
    """The mode is what ``str()`` gives, as in 0.0.7."""

    class Mode:
        def __str__(self):
            return "always"

    model = GPipe(linears(1, 1), [1], checkpoint=Mode())
    assert (model.checkpoint, type(model.checkpoint)) == ("always", str)


def test_too_few_devices():
    with pytest.raises(IndexError, match=r"partitions: 2, devices: \['cpu'\].*several times"):
        GPipe(linears(1, 1, 1), [1, 1], devices=["cpu"])


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_missing_balance(arguments):
    """The class of the error is the same as in 0.0.7."""
    with pytest.raises(ValueError, match=r"balance: None\).*pass \[3\], .*balance_by_time"):
        GPipe(linears(1, 1, 1, 1), *arguments)


@pytest.mark.parametrize("device", ["cuda:99", 99, "cpp", None])
def test_device_that_is_not_there(device):
    with pytest.raises(ValueError, match=rf"device: {device}, there are: cpu.*several times"):
        GPipe(linears(1, 1), [1], devices=[device])


def test_indices_without_accelerators(monkeypatch):
    def none(device):
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(options, "accelerators", list)
    monkeypatch.setattr(options, "canonical_device", none)
    with pytest.raises(ValueError, match=r"device: 0, there are: cpu\).*several times"):
        GPipe(linears(1, 1, 1), [1, 1], devices=[0, 1])


def test_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    model = GPipe(linears(1, 1, 1), np.array([1, 1]), devices=["cpu"] * 2, chunks=np.int64(2))
    assert (model.balance, model.chunks) == ([1, 1], 2)
    assert {type(x) for x in [*model.balance, model.chunks]} == {int}


@pytest.mark.parametrize(
    ("balance", "chunks"),
    [([2.0, 1.0], 8 / 2), (torch.tensor([2, 1]), torch.tensor(4)), ([Fraction(2), 1], 4)],
)
def test_integral_values(balance, chunks):
    model = GPipe(linears(1, 1, 1, 1), balance, devices=["cpu"] * 2, chunks=chunks)
    assert (model.balance, model.chunks) == ([2, 1], 4)
    assert {type(x) for x in [*model.balance, model.chunks]} == {int}
    model.chunks = 6.0
    assert type(model.chunks) is int


def test_further_devices_are_left_alone():
    model = GPipe(linears(1, 1), [1], devices=["cpu", "cpu", "meta"])
    assert model.devices == [torch.device("cpu")]


def test_default_devices(monkeypatch):
    monkeypatch.setattr(options, "accelerators", list)
    assert GPipe(linears(1, 1, 1), [1, 1]).devices == [torch.device("cpu")] * 2
    monkeypatch.setattr(options, "accelerators", lambda: [torch.device("meta")] * 3)
    assert GPipe(linears(1, 1, 1), [1, 1]).devices == [torch.device("meta")] * 2
    with pytest.raises(IndexError):
        GPipe(linears(1, 1, 1, 1, 1), [1] * 4)


def test_arguments_are_checked_before_anything_is_moved():
    module = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1))
    module[1].running_mean = module[0].running_mean
    with pytest.raises(ValueError, match="can be shared only"):
        GPipe(module, [1, 1], devices=["meta", "cpu"])
    assert not module[0].weight.is_meta
