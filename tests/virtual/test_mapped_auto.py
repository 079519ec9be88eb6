"""A model that is measured on an accelerator is spread over all of them, and loses no time."""

import copy
from functools import partial

import pytest
import torch

from tests.support.architectures import ARCHITECTURES, build
from tests.support.helpers import assert_no_races, notes_of
from tests.support.size import some
from tests.virtual.stages import limit
from tests.virtual.test_mapped import Chain
from torchgpipe import MappedGPipe
from torchgpipe.planner import given, maps
from torchgpipe.planner.blocks import timed
from torchgpipe.testing import observe

# Tied weights are used on the streams of two visits.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")


@pytest.fixture(autouse=True)
def four(devices, monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    monkeypatch.setattr(given, "accelerators", lambda: devices[:4])


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


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [*ARCHITECTURES][: some(len(ARCHITECTURES), 2)])
def test_architectures(devices, name, count):
    """Each trains as it is, by the map that was found for it."""
    model, inputs = build(name)
    plain = copy.deepcopy(model)
    rows = [dict(zip(inputs, parts)) for parts in zip(*[x.chunk(2) for x in inputs.values()])]
    torch.stack([plain(**x).loss for x in rows]).mean().backward()
    pipe = MappedGPipe(model, "auto", sample=rows[0], devices=devices[:count], chunks=2)
    assert {x.device for x in pipe.parameters()} == {*devices[:count]}
    pipe(**{key: x.to(devices[0]) for key, x in inputs.items()}).loss.mean().backward()
    for (key, own), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), key
        if own.grad is not None:
            assert torch.allclose(own.grad.cpu(), other.grad, rtol=1e-3, atol=1e-5), key


class Fussy(Chain):
    """Code that does not run with a list on two devices."""

    def __init__(self):
        super().__init__(2)
        self.layers = torch.nn.Sequential(*self.layers)
        self.stem, self.head = Chain(1).layers[0], Chain(1).layers[0]

    def forward(self, x):
        if len({layer.weight.device for layer in self.layers}) > 1:
            raise RuntimeError("apart")
        return self.head(self.layers(self.stem(x)))


def test_a_map_that_the_code_does_not_run_with_gives_way(devices):
    with observe(), pytest.raises(RuntimeError, match="apart") as caught:
        MappedGPipe(Fussy(), "auto", sample=torch.rand(2, 4), devices=devices[:4])
    assert "no map that its code runs with" in notes_of(caught.value)[-1]
    model = Fussy().to(devices[0])
    with observe():
        pipe = MappedGPipe(model, "auto", sample=torch.rand(2, 4), devices=devices[:3], chunks=2)
    assert [*pipe.device_map] == ["", "stem", "layers", "head"]
    pipe(torch.rand(4, 4, device=devices[0])).sum().backward()
    assert all(x.grad is not None for x in pipe.parameters())
