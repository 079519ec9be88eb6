"""After an error anywhere in a step between devices, in a copy too, the next step is right."""

import pytest
import torch

from tests.contract.planned import made, plan, verify_anywhere
from tests.contract.test_contract import LOCAL
from tests.contract.wrapped import Maker
from tests.support.helpers import MODES
from tests.support.size import some
from torchgpipe.autograd import copy

# Micro-batches on their way at the same time.
RUNS = some(
    [*LOCAL, "MappedGPipe, threads"], ["GPipe", "ScheduledLoss zbh1", "MappedGPipe, threads"]
)

NUMBER = torch.zeros(1, device="cpu")


@pytest.fixture
def counted(monkeypatch):
    """Let copies between devices raise, before and after each."""

    def counting(*args, **options):
        plan.comes("copy", NUMBER)
        found = moved(*args, **options)
        plan.comes("copy", NUMBER)
        return found

    moved = copy.moved
    monkeypatch.setattr(copy, "moved", counting)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", RUNS)
def test_errors_anywhere(devices, run, mode):
    options = {} if run in LOCAL else {"threads": 2}
    model = made(Maker(run.removesuffix(", threads"), mode, devices[:2]), steps=3, **options)
    verify_anywhere(model, autocast=(RUNS.index(run) + MODES.index(mode)) % 2 == 1)
