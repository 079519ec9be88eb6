"""The arguments of the wrapper: balance, devices, chunks and checkpoint."""

import pytest
import torch
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe
from torchgpipe.partition import arguments as options


def test_defaults(device):
    model = GPipe(linears(1, 1), [1])
    assert (model.chunks, model.checkpoint, model.balance) == (1, "except_last", [1])


@pytest.mark.parametrize("balance", [[0, 3], [-1, 4], [1.5, 1.5], [True, 2], ["3"], [None]])
def test_balance_of_other_numbers(balance):
    with pytest.raises(ValueError, match=r"must be positive integers.*balance: \["):
        GPipe(linears(1, 1, 1, 1), balance)


@pytest.mark.parametrize("balance", [[], [1], [2, 2]])
def test_balance_that_does_not_add_up(balance):
    with pytest.raises(ValueError, match=rf"sum: {sum(balance)}, layers: 3.*every layer"):
        GPipe(linears(1, 1, 1, 1), balance)


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2", None, True])
def test_chunks(chunks):
    model = GPipe(linears(1, 1), [1], chunks=2)
    for change in (
        lambda: GPipe(linears(1, 1), [1], chunks=chunks),
        lambda: setattr(model, "chunks", chunks),
    ):
        with pytest.raises(ValueError, match=rf"positive integer.*chunks: {chunks!r}"):
            change()
    assert model.chunks == 2


@pytest.mark.parametrize("checkpoint", ["sometimes", None, True])
def test_checkpoint(checkpoint):
    model = GPipe(linears(1, 1), [1])
    for change in (
        lambda: GPipe(linears(1, 1), [1], checkpoint=checkpoint),
        lambda: setattr(model, "checkpoint", checkpoint),
    ):
        with pytest.raises(ValueError, match=rf"one of 'always'.*checkpoint: {checkpoint!r}"):
            change()
    assert model.checkpoint == "except_last"


def test_too_few_devices():
    with pytest.raises(IndexError, match=r"partitions: 2, devices: \['cpu'\].*several times"):
        GPipe(linears(1, 1, 1), [1, 1], devices=["cpu"])


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), 0])
def test_devices_that_are_not_a_sequence(devices):
    with pytest.raises(TypeError, match=rf"devices: .*pass \['{devices}'\] \* 2"):
        GPipe(linears(1, 1, 1), [1, 1], devices=devices)


@pytest.mark.parametrize("balance", [3, None])
def test_balance_that_is_not_a_sequence(balance):
    with pytest.raises(TypeError, match=rf"balance: {balance}\); for one partition, pass \[3\]"):
        GPipe(linears(1, 1, 1, 1), balance)


def test_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"device: cuda:99, there are: cpu.*several times"):
        GPipe(linears(1, 1), [1], devices=["cuda:99"])


def test_numbers_of_numpy():
    np = pytest.importorskip("numpy")
    model = GPipe(linears(1, 1, 1), np.array([1, 1]), devices=["cpu"] * 2, chunks=np.int64(2))
    assert (model.balance, model.chunks) == ([1, 1], 2)
    assert {type(x) for x in [*model.balance, model.chunks]} == {int}


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
    module = linears(1, 1, 1)
    module[1].weight = module[0].weight
    with pytest.raises(ValueError, match="can be shared only"):
        GPipe(module, [1, 1], devices=["meta", "cpu"])
    assert not module[0].weight.is_meta


def test_other_module():
    with pytest.raises(TypeError, match="module: Linear"):
        GPipe(nn.Linear(1, 1), [1])
