"""After an error anywhere all is as before: schedules that the contract has not.

They have overlaps, or several stages of a worker.
"""

from functools import partial

import pytest
import torch
from torch import nn

from tests.contract.planned import Hooked, Layer, loss, step, verify_anywhere, verify_early
from tests.contract.wrapped import Maker, Scheduled
from tests.support.helpers import MODES
from tests.support.size import soak
from torchgpipe import GPipe, ScheduledLoss

NAMES = [f"{x} {stages}" for x in ("dualpipe_v", "interleaved") for stages in ("eager", "graph")]


def training_of(name, mode, draws):
    torch.manual_seed(0)
    schedule, stages = name.split()
    kind = Layer if stages == "graph" else Hooked
    layers = nn.Sequential(*[kind(True, draws) for _ in range(4)])
    model = GPipe(layers, [1] * 4, devices=["cpu"] * 4, chunks=4, checkpoint=mode)
    training = ScheduledLoss(model, loss, schedule, stages=stages, outputs=True)
    return Scheduled(Maker("ScheduledLoss 1f1b", mode), layers, training, loss)


@pytest.mark.parametrize("name", NAMES)
def test_errors_anywhere(name, mode):
    k = NAMES.index(name)
    # Layers run, then are traced; and the third step may know that they draw nothing.
    training = training_of(name, mode, 0.2 if k in (0, 3) else 0.0)
    autocast = (k + MODES.index(mode)) % 2 == 1
    for _ in range(3):
        step(training, autocast)
    verify_anywhere(training, autocast)


@soak
@pytest.mark.parametrize("name", NAMES)
def test_errors_before_anything_is_known(name):
    verify_early(partial(training_of, name, "always", 0.2))
