"""Parameters that layers change in forward: a recomputation finds what the first run found."""

import copy

import pytest
import torch
from torch import nn

from tests.support.changing_parameters import CHANGES, Scaled
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, verify_recomputation
from torchgpipe.recompute import buffers

CPUS = ["cpu", "cpu"]


def gpipe(layers, mode):
    return GPipe(layers, [2, 2], devices=CPUS, chunks=3, checkpoint=mode)


def mapped(layers, mode):
    places = {"": "cpu"} | {str(k): "cpu" for k in range(4)}
    return MappedGPipe(layers, places, chunks=3, checkpoint=mode)


def scheduled(name, **options):
    def wrap(layers, mode):
        loss = ScheduledLoss(gpipe(layers, mode), nn.functional.mse_loss, name, **options)
        return lambda x: loss(x, torch.zeros_like(x))

    return wrap


WRAPPERS = {
    "GPipe": gpipe,
    "MappedGPipe": mapped,
    "gpipe": scheduled("gpipe"),
    "1f1b": scheduled("1f1b"),
    "zbh1": scheduled("zbh1"),
    "graphs": scheduled("1f1b", stages="graph"),
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


@pytest.mark.parametrize("wrapper", ["GPipe", "MappedGPipe"])
def test_two_forwards_before_their_backwards(wrapper):
    layers = model_of(*[nn.Sequential(nn.Linear(4, 4), Scaled("new memory")) for _ in range(4)])
    found = []
    for mode in ("never", "always"):
        model = WRAPPERS[wrapper](copy.deepcopy(layers), mode)
        losses = [model(torch.arange(28.0).view(7, 4) * k).square().mean() for k in (1, 2)]
        for loss in losses:
            loss.backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    same(*found)


def test_parameter_that_two_partitions_share():
    first = Scaled("in place")
    second = Scaled("in place")
    second.scale = first.scale
    layers = model_of(nn.Linear(4, 4), first, nn.Linear(4, 4), second)
    same(trained(layers, gpipe, "always", 3), trained(layers, gpipe, "never", 3))


def test_large_parameter(monkeypatch):
    monkeypatch.setattr(buffers, "SMALL", 0)
    for change in ("new memory", "another parameter"):
        layers = model_of(nn.Linear(4, 4), Scaled(change), Scaled(change), nn.Linear(4, 4))
        same(trained(layers, gpipe, "always"), trained(layers, gpipe, "never"))


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


@pytest.mark.parametrize("wrapper", WRAPPERS.keys() - {"graphs"})
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


def test_the_remedy_of_a_change_that_begins_later():
    class Late(Scaled):
        steps = 0

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(1)
            return super().forward(x) if self.steps else x * self.scale.clone()

    layers, found = model_of(nn.Linear(4, 4), Late("in place"), nn.Linear(4, 4), nn.Tanh()), []
    for mode in ("never", "always"):
        model = gpipe(copy.deepcopy(layers), mode)
        for model[1].steps in range(2):
            model(torch.ones(7, 4)).square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    same(*found)


def test_verification_finds_nothing():
    model = gpipe(
        model_of(nn.Linear(4, 4), *[Scaled(change) for change in [*CHANGES][:3]]), "always"
    )
    for _ in range(2):
        with verify_recomputation():
            model(torch.randn(6, 4)).square().mean().backward()
