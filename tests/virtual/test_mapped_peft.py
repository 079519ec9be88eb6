"""A model with adapters over virtual accelerators: frozen devices have no backward at all."""

import pytest

from tests.behaviour.test_mapped_peft import IGNORED, adapted, compare, names
from tests.support.helpers import MODES, assert_no_races
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

pytestmark = IGNORED


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [None, [2]], ids=["all layers", "last layer"])
def test_gradients(devices, mode, layers):
    with observe() as seen:
        compare(devices[:3], mode, layers)
    assert_no_races(seen)


@pytest.mark.parametrize("mode", MODES)
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
