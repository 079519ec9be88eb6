"""A model that is measured on an accelerator is spread over all of them, and loses no time."""

from functools import partial

import pytest
import torch

from tests.support.helpers import assert_no_races
from tests.virtual.stages import limit
from tests.virtual.test_mapped import Chain
from torchgpipe import MappedGPipe
from torchgpipe.balance.device_map import timed
from torchgpipe.planner import map_choice as choice
from torchgpipe.planner import maps
from torchgpipe.testing import observe


@pytest.fixture(autouse=True)
def four(devices, monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    monkeypatch.setattr(choice, "accelerators", lambda: devices[:4])


def test_makespan(devices):
    model = Chain(8).to(devices[0])
    with observe() as seen:
        pipe = MappedGPipe(model, "auto", sample=torch.rand(1, 4), chunks=8, checkpoint="never")
    assert_no_races(seen)
    names = {f"layers.{k}": devices[k // 2] for k in range(8)}
    assert pipe.device_map == {"": devices[0], **names}
    with observe() as seen:
        pipe(torch.rand(8, 4, device=devices[0])).sum().backward()
    assert_no_races(seen)
    assert seen.makespan == 2 * limit("never", 4, 8)


def test_a_model_on_the_cpu_is_measured_there(devices):
    pipe = MappedGPipe(Chain(8), "auto", sample=torch.rand(1, 4), chunks=2)
    assert {x.device for x in pipe.parameters()} == {*devices[:4]}
    pipe(torch.rand(2, 4)).sum().backward()
