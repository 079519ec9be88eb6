"""Advice on models under badly chosen device maps and settings, followed, gains what it says."""

import copy

import pytest
import torch
from torch import nn

from tests.support.planning import Timed
from tests.support.size import some
from tests.virtual.test_advice import layers_of
from torchgpipe import MappedGPipe, _torch, trace
from torchgpipe.testing import observe

ROWS = 16


class Waiting(Timed):
    """A layer that waits for its device, before its own work and after it."""

    def forward(self, input):
        output = super().forward(input)
        return output * 2 if output.sum().item() > 1e6 else output


class Asking(Timed):
    """A layer that waits for what comes before it, and goes on with long work."""

    def forward(self, input):
        return super().forward(-input if bool((input > 1e6).any()) else input)


def waiting(kind, count=8):
    return nn.Sequential(*[kind(nn.Tanh(), (0.5, 0.5, 0.5)) for _ in range(count)])


#: By name: the layers, the number of them on each device, settings, what is observed, and what is
#: advised.
CASES = {
    "bad cut": (layers_of([0.5] * 8), [4, 2, 1, 1], {"chunks": 8}, {}, [2, 2, 2, 2]),
    "bad cut, computed again": (
        layers_of([0.5] * 8),
        [4, 2, 1, 1],
        {"chunks": 8, "checkpoint": "except_last"},
        {},
        [2, 2, 2, 2],
    ),
    "layers that wait": (waiting(Waiting), [2] * 4, {"chunks": 8}, {}, {"threads": 4}),
    "layers that wait, computed again": (
        waiting(Waiting),
        [2] * 4,
        {"chunks": 8, "checkpoint": "always"},
        {},
        {"threads": 4},
    ),
    "layers that ask first": (waiting(Asking, 4), [1] * 4, {"chunks": 8}, {}, None),
}


def mapped(layers, devices, sizes, **options):
    names = iter(range(len(layers)))
    places = {str(next(names)): x for x, size in zip(devices, sizes) for _ in range(size)}
    options = {"checkpoint": "never", **options}
    return MappedGPipe(copy.deepcopy(layers), places, **options)


def traced(model, devices, observed=None):
    x = torch.rand(ROWS, 4, device=devices[0])
    for _ in range(2):
        model(x).sum().backward()
    with observe(**(observed or {})), trace(model) as timeline:
        model(x).sum().backward()
    return timeline


@pytest.mark.parametrize("case", some([*CASES], ["bad cut", "layers that wait"]))
def test_advice_that_is_followed(devices, case):
    layers, sizes, options, observed, expected = CASES[case]
    model = mapped(layers, devices, sizes, **options)
    before = traced(model, devices, observed)
    advice = before.advice
    if "device_map" in advice.change:
        options = {"checkpoint": "never", **options}
        model = MappedGPipe(copy.deepcopy(layers), advice.change["device_map"], **options)
        found = [[*model.device_map.values()].count(x) for x in devices[:4]]
    else:
        found = dict(advice.change)
        for name, value in found.items():
            setattr(model, name, value)
    after = traced(model, devices, observed)
    gain = 1 - after.makespan / before.makespan
    assert advice.gain == pytest.approx(gain, abs=0.05)
    if expected is not None:
        assert found == expected
    assert str(before).endswith(str(advice))


class Model(nn.Module):
    """Blocks by any map."""

    def __init__(self, times, layer=None):
        super().__init__()
        self.blocks = layers_of(times) if layer is None else waiting(layer, len(times))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def wrapped(model, devices, sizes, **options):
    names = iter(range(sum(sizes)))
    places = {f"blocks.{next(names)}": x for x, size in zip(devices, sizes) for _ in range(size)}
    return MappedGPipe(model, places, **{"checkpoint": "never", **options})


def test_the_sentence_names_what_moves(devices):
    model = wrapped(Model([0.5] * 6), devices, [4, 2], chunks=8)
    advice = traced(model, devices).advice
    assert advice.change["device_map"] == model.device_map | {"blocks.3": devices[1]}
    assert f"longer than the mean: with blocks.3 on {devices[1]}, the step is" in str(advice)


class Drawing(Waiting):
    """A layer that waits, and draws on the CPU, so one thread computes all micro-batches."""

    def forward(self, input):
        return super().forward(input) * (1 + 1e-9 * torch.rand(1).item())


@pytest.mark.parametrize(
    ("layer", "threads"), some([(Waiting, 4), (Drawing, 1), (Drawing, 4)], [(Drawing, 1)])
)
def test_threads_are_not_said_where_they_do_not_help(devices, layer, threads):
    model = wrapped(Model([0.5] * 4, layer), devices, [1] * 4, chunks=ROWS, threads=threads)
    advice = traced(model, devices).advice
    assert advice is None or "threads" not in advice.change


def test_the_model_is_left_alone(devices):
    model = wrapped(Model([0.5] * 4), devices, [3, 1], chunks=2)
    before = copy.copy(model._forward_pre_hooks)
    with pytest.raises(ValueError, match="no"), trace(model):
        model(torch.rand(4, 4, device=devices[0]))
        raise ValueError("no")
    assert model._forward_pre_hooks == before
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())
    assert _torch.count_function_modes() == 0
