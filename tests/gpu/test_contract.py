"""Wrappers on GPUs keep the promises about devices; partitions share a GPU if there is only one."""

from itertools import groupby

import pytest
import torch

from tests.contract.promises import keeps
from tests.contract.test_contract import LOCAL, cases
from tests.contract.wrapped import Maker
from tests.support.size import some
from tests.virtual.test_contract import OF_CELLS, OF_DEVICES

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA knows no GPU here"),
]


CASES = [x for x in cases(LOCAL) if x.values[0] in OF_DEVICES]
#: Each promise with one run and one mode, by turns.
FEW = [
    (found := [*several])[number % len(found)]
    for number, (_, several) in enumerate(groupby(CASES, lambda x: x.values[0]))
]


@pytest.mark.parametrize(("name", "run", "mode"), some(CASES, FEW))
def test_promise(name, run, mode, gpus):
    keeps(name, Maker(run, mode, gpus))


@pytest.mark.parametrize(("name", "run", "mode"), OF_CELLS)
def test_promise_of_cells_that_leave(name, run, mode, gpus, monkeypatch):
    # Tensors of promises are small, and micro-batches are few.
    monkeypatch.setattr("torchgpipe.recompute.storage.LEAST", 1)
    monkeypatch.setattr("torchgpipe.schedule.trips.BETWEEN", 0)
    keeps(name, Maker(run, mode, gpus))
