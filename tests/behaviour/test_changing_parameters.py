"""Parameters that layers change in forward: a recomputation finds what the first run found."""

import copy

import pytest
import torch
from torch import nn

from tests.support.changing_parameters import Scaled
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss
from torchgpipe.recompute import buffers

CPUS = ["cpu", "cpu"]


def gpipe(layers, mode):
    return GPipe(layers, [2, 2], devices=CPUS, chunks=3, checkpoint=mode)


def mapped(layers, mode):
    places = {"": "cpu"} | {str(k): "cpu" for k in range(4)}
    return MappedGPipe(layers, places, chunks=3, checkpoint=mode)


def scheduled(name):
    def wrap(layers, mode):
        loss = ScheduledLoss(gpipe(layers, mode), nn.functional.mse_loss, name)
        return lambda x: loss(x, torch.zeros_like(x))

    return wrap


WRAPPERS = {
    "GPipe": gpipe,
    "MappedGPipe": mapped,
    "1f1b": scheduled("1f1b"),
}


def trained(layers, wrap, mode, steps=2):
    """The gradients and parameters after some steps of uneven micro-batches."""
    layers = copy.deepcopy(layers)
    model = wrap(layers, mode)
    torch.manual_seed(1)
    found = []
    for _ in range(steps):
        model(torch.randn(7, 4)).square().mean().backward()
        found += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        found += [p.detach().clone() for p in layers.parameters()]
    return found


def model_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers)


def same(found, expected):
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("change", ["in place", "in place in data", "signs in data"])
@pytest.mark.parametrize("wrapper", ["GPipe", "MappedGPipe", "1f1b"])
def test_large_parameter_that_changes_in_place_is_an_error(wrapper, change, trains, monkeypatch):
    """In each step, until the layer is another one."""
    monkeypatch.setattr(buffers, "SMALL", 0)
    layers = model_of(nn.Linear(4, 4), Scaled(change, trains), nn.Tanh(), nn.Linear(4, 4))
    model = WRAPPERS[wrapper](layers, "always")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"large .*: Scaled, parameter: scale, bytes: 16, "):
            model(torch.randn(7, 4)).square().mean().backward()
    monkeypatch.undo()
    layers = model_of(nn.Linear(4, 4), Scaled("new memory", trains), nn.Tanh(), nn.Linear(4, 4))
    monkeypatch.setattr(buffers, "SMALL", 0)
    expected = trained(layers, WRAPPERS[wrapper], "never")
    same(trained(layers, WRAPPERS[wrapper], "always"), expected)


@pytest.mark.parametrize("shape", [(), (7,), (200,), (3, 5), (4, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_changes_of_large_parameters_that_are_seen(shape, dtype, monkeypatch):
    """One element, a change of all signs, rows that change places, and no change from a NaN."""
    monkeypatch.setattr(buffers, "SMALL", 0)
    changes = [
        lambda x: x.data[(-1,) * x.dim()].mul_(2),
        lambda x: x.data.neg_(),
        lambda x: x.data.copy_(x.data.flip(0)) if shape else x.data.zero_(),
        lambda x: None,
    ]
    for change in changes:
        for layout in (torch.contiguous_format, torch.channels_last):
            own = torch.randn(shape, dtype=dtype) + 1
            if shape:
                own.view(-1)[0] = torch.nan
            if len(shape) == 4:
                own = own.to(memory_format=layout)
            layer = nn.Module()
            layer.weight = nn.Parameter(own)
            place = [(layer, "weight")]
            found = buffers.Buffers([], {}, place, (layer, ""))
            with found.first_run([]):
                change(layer.weight)
            assert bool(found.changing) == (change is not changes[-1])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_change_that_begins_later_is_an_error(wrapper):
    class Late(Scaled):
        def forward(self, x):
            return super().forward(x) if self.on else x

    layers = model_of(nn.Linear(4, 4), Late("in place"), nn.Linear(4, 4), nn.Tanh())
    layers[1].on = False
    model = WRAPPERS[wrapper](layers, "always")
    model(torch.randn(6, 4)).mean().backward()
    layers[1].on = True
    with pytest.raises(RuntimeError, match="first (?s:.*)layer: Late"):
        model(torch.randn(6, 4)).mean().backward()
