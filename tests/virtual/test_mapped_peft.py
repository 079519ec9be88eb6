"""A model with adapters over virtual accelerators: frozen devices have no backward at all."""

from functools import partial

import pytest

from tests.behaviour.test_mapped_peft import IGNORED, adapted, compare, names
from tests.support.helpers import MODES, assert_no_races
from tests.support.packed import PackedLinear, PackedWeight
from tests.virtual.stages import ONE_MODE
from torchgpipe import MappedGPipe
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import timed
from torchgpipe.testing import observe

pytestmark = IGNORED


@pytest.mark.parametrize("mode", ONE_MODE)
@pytest.mark.parametrize("layers", [None, [2]], ids=["all layers", "last layer"])
def test_gradients(devices, mode, layers):
    with observe() as seen:
        compare(devices[:3], mode, layers)
    assert_no_races(seen)


@pytest.mark.parametrize("mode", ONE_MODE)
def test_embeddings_that_require_grad(devices, mode):
    with observe() as seen:
        compare(devices[:3], mode, [2], inputs_too=True)
    assert_no_races(seen)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("layers", "busy"), [(None, {0, 1, 2}), ([1], {1, 2}), ([2], {2})])
def test_devices_in_front_of_the_adapters_compute_nothing_in_backward(devices, mode, layers, busy):
    model, inputs = adapted(layers)
    pipe = MappedGPipe(model, names(devices[:3]), chunks=2, checkpoint=mode)
    loss = pipe(**inputs).loss.mean()
    with observe(costs={"mm": 1.0, "bmm": 1.0}) as seen:
        loss.backward()
    assert_no_races(seen)
    assert {stream.device for stream in seen.busy} == busy


@pytest.mark.parametrize("mode", ONE_MODE)
def test_packed_weights(devices, mode):
    """Packed weights come to their devices with all that belongs to them."""
    with observe() as seen:
        compare(devices[:2], mode, packed=True)
    assert_no_races(seen)


def test_packed_weights_under_a_map_that_is_measured(devices, monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    model, inputs = adapted(packed=True)
    sample = {key: x[:2] for key, x in inputs.items()}
    pipe = MappedGPipe(model, "auto", sample=sample, devices=devices[:2], chunks=2, memory="1GB")
    assert {x.device for x in pipe.parameters()} == {*devices[:2]}
    packed = [x for x in pipe.modules() if isinstance(x, PackedLinear)]
    assert len(packed) == 21
    for x in packed:
        assert isinstance(x.weight, PackedWeight)
        assert x.weight.state.scale.device == x.weight.device
    pipe(**inputs).loss.mean().backward()
    assert all((x.grad is not None) == x.requires_grad for x in pipe.parameters())
