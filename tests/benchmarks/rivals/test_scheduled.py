"""A training under a schedule takes the steps of the plain training."""

import pytest
import torch

from benchmarks.rivals.library import Library
from benchmarks.rivals.plain import Accumulation
from benchmarks.rivals.scheduled import Scheduled
from torchgpipe import GPipe

GPT = {"name": "gpt", "vocabulary": 8, "context": 4, "layers": 1, "width": 8, "heads": 2}
SETTING = {"model": GPT, "size": 4, "batch": 4, "balance": [2, 3], "m": 2, "mode": "never"}


@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"])
def test_step(schedule):
    library = Library(GPipe, [torch.device("cpu")] * 2)
    trainings = [Accumulation(library, **SETTING), Scheduled(library, schedule, **SETTING)]
    for training in trainings:
        (group,) = training.optimizer.param_groups
        group["lr"] = 1.0
        training.step()
        assert all(x.grad is None for x in training.model.parameters())
    plain, scheduled = (list(x.model.parameters()) for x in trainings)
    for found, wanted in zip(scheduled, plain, strict=True):
        torch.testing.assert_close(found, wanted)
