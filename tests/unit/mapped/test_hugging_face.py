"""A model that Accelerate has dispatched is taken over as it stands."""

import pytest
import torch
from torch import nn

from torchgpipe import MappedGPipe

pytest.importorskip("accelerate")

from accelerate import cpu_offload, dispatch_model


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x))


def test_dispatched():
    torch.manual_seed(0)
    model = Model()
    x = torch.rand(4, 3)
    expected = model(x)
    dispatch_model(model, {"first": "cpu", "second": "cpu"}, force_hooks=True)
    pipe = MappedGPipe(model, chunks=2)
    assert pipe.device_map == {"first": torch.device("cpu"), "second": torch.device("cpu")}
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    torch.testing.assert_close(pipe(x), expected)


def test_a_forward_around_that_of_accelerate():
    """The forward stays, as that which TRL puts around a reference model."""
    model, x = Model(), torch.rand(4, 3)
    expected = 2 * model(x)
    dispatch_model(model, {"first": "cpu", "second": "cpu"}, force_hooks=True)
    inner = model.forward
    model.forward = lambda x: 2 * inner(x)
    torch.testing.assert_close(MappedGPipe(model, chunks=2)(x), expected)


def test_dispatched_with_another_map():
    model = dispatch_model(Model(), {"first": "cpu", "second": "cpu"}, force_hooks=True)
    pipe = MappedGPipe(model, {"": "meta"}, chunks=2)
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    # The hooks would bring it to the CPU.
    assert pipe(torch.rand(4, 3, device="meta")).device.type == "meta"


def test_not_dispatched(monkeypatch):
    monkeypatch.setattr("torchgpipe.mapped.hugging_face.accelerators", lambda: ["one"])
    with pytest.raises(ValueError, match="must be given"):
        MappedGPipe(Model())


@pytest.mark.parametrize("device_map", [None, "auto", {"": "cpu"}], ids=str)
def test_offloaded(device_map):
    model = cpu_offload(Model(), execution_device=torch.device("cpu"))
    model.hf_device_map = {"first": "cpu", "second": "cpu"}
    options = {"sample": torch.rand(2, 3), "devices": ["cpu"]} if device_map == "auto" else {}
    with pytest.raises(ValueError, match=r"offloaded: \['first', 'second'\]"):
        MappedGPipe(model, device_map, **options)


def test_on_disk():
    model = Model()
    model.hf_device_map = {"first": "cpu", "second": "disk"}
    with pytest.raises(ValueError, match=r"offloaded: \['second'\]"):
        MappedGPipe(model)
