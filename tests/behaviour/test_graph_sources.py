"""Stages that are graphs see what layers read in classes, globals, caches and proxies."""

import functools
import operator
import os
import types
from contextvars import ContextVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.helpers import assert_graphs
from torchgpipe import GPipe, ScheduledLoss

NUMBER = 1.0
TABLE = {"deep": [1.0]}


class Config:
    def __init__(self):
        self.scale = 1.0


CONFIG = Config()
VARIABLE = ContextVar("VARIABLE", default=1.0)
ACTIVATION = F.relu
MODULE = types.ModuleType("tests_settings")
MODULE.scale = 1.0
SIGN = 0.0


class Meta(type):
    shared = 1.0


class Settings(metaclass=Meta):
    scale, table = 1.0, [1.0]

    @staticmethod
    def twice():
        return NUMBER * 2


class Base:
    scale = 1.0


class Helper(Base):
    def __init__(self):
        self.own = 1.0

    @property
    def number(self):
        return NUMBER * self.scale

    def __call__(self, x):
        return x * self.number


HELPER = Helper()


def helper(x):
    return deeper(x) * CONFIG.scale


def deeper(x):
    return sum(x * a for a in TABLE["deep"])


@functools.lru_cache
def kept():
    return CONFIG.scale


class Layer(nn.Module):
    scale, table, sign = 1.0, {"a": [1.0]}, 0.0

    def __init__(self, read):
        super().__init__()
        self.layer, self.read = nn.Linear(3, 3), read
        self.layer.weight.scale = 1.0
        self.array = numpy.array([1.0, None], dtype=object)
        self.settings, self.get = MODULE, operator.attrgetter("scale")

    def forward(self, x):
        return self.read(self, self.layer(x))


def sign(x, zero):
    return x * float(numpy.copysign(2.0, zero))


def put(name, value):
    return lambda layer, monkeypatch: monkeypatch.setitem(globals(), name, value)


def set_on(owner, name, value):
    return lambda layer, monkeypatch: monkeypatch.setattr(owner, name, value, raising=False)


def own(change):
    return lambda layer, monkeypatch: change(layer)


def clear(layer, monkeypatch):
    monkeypatch.setattr(CONFIG, "scale", 3.0)
    kept.cache_clear()


#: How a layer reads something, and what changes it.
CASES = {
    "class": (lambda own, x: x * own.scale, set_on(Layer, "scale", 3.0)),
    "class, deep": (
        lambda own, x: x * own.table["a"][0],
        lambda layer, monkeypatch: monkeypatch.setitem(Layer.table, "a", [3.0]),
    ),
    "class, a zero": (lambda own, x: sign(x, own.sign), set_on(Layer, "sign", -0.0)),
    "class, new": (lambda own, x: x * getattr(own, "new", 1.0), set_on(Layer, "new", 3.0)),
    "class of an object": (lambda own, x: HELPER(x), set_on(Base, "scale", 3.0)),
    "method": (
        lambda own, x: HELPER(x),
        set_on(Helper, "__call__", lambda self, x: x * 3),
    ),
    "class by its name": (lambda own, x: x * Settings.scale, set_on(Settings, "scale", 3.0)),
    "class by its name, deep": (
        lambda own, x: x * Settings.table[0],
        set_on(Settings, "table", [3.0]),
    ),
    "metaclass": (lambda own, x: x * Settings.shared, set_on(Meta, "shared", 3.0)),
    "environment": (
        lambda own, x: x * float(os.environ.get("TESTS_SCALE", "1.0")),
        lambda layer, monkeypatch: monkeypatch.setenv("TESTS_SCALE", "3.0"),
    ),
    "static method": (lambda own, x: x * Settings.twice(), put("NUMBER", 3.0)),
    "object that is made": (lambda own, x: Helper()(x), put("NUMBER", 3.0)),
    "global": (lambda own, x: x * NUMBER, put("NUMBER", 3.0)),
    "global, other type": (
        lambda own, x: x / NUMBER if NUMBER is not True else x * 3,
        put("NUMBER", True),
    ),
    "global zero": (lambda own, x: sign(x, SIGN), put("SIGN", -0.0)),
    "global function": (lambda own, x: ACTIVATION(x), put("ACTIVATION", F.gelu)),
    "global, within": (lambda own, x: sum(a * NUMBER for a in (x,)), put("NUMBER", 3.0)),
    "helper": (lambda own, x: helper(x), set_on(CONFIG, "scale", 3.0)),
    "helper's helper": (
        lambda own, x: helper(x),
        lambda layer, monkeypatch: monkeypatch.setitem(TABLE, "deep", [3.0]),
    ),
    "helper that is replaced": (lambda own, x: helper(x), put("deeper", lambda x: x * 3)),
    "module": (lambda own, x: x * MODULE.scale, set_on(MODULE, "scale", 3.0)),
    "module in an attribute": (
        lambda own, x: x * own.settings.scale,
        set_on(MODULE, "scale", 3.0),
    ),
    "cached function": (lambda own, x: x * kept(), clear),
    "context variable": (lambda own, x: x * VARIABLE.get(), own(lambda layer: VARIABLE.set(3.0))),
    "parameter": (
        lambda own, x: x * own.layer.weight.scale,
        own(lambda layer: setattr(layer.layer.weight, "scale", 3.0)),
    ),
    "parameter, new": (
        lambda own, x: x * getattr(own.layer.bias, "scale", 1.0),
        own(lambda layer: setattr(layer.layer.bias, "scale", 3.0)),
    ),
    "getter": (lambda own, x: x * own.get(CONFIG), set_on(CONFIG, "scale", 3.0)),
}


def training_of(layer, loss=F.mse_loss):
    model = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    return ScheduledLoss(model, loss, "1f1b", stages="graph")


@pytest.fixture
def variable():
    token = VARIABLE.set(1.0)
    yield
    VARIABLE.reset(token)


@pytest.mark.usefixtures("variable")
@pytest.mark.parametrize("name", CASES)
def test_what_changes_between_steps_is_seen(name, monkeypatch):
    torch.manual_seed(0)
    read, change = CASES[name]
    kept.cache_clear()
    layer, x = Layer(read), torch.randn(4, 3)
    training = training_of(layer)
    before = training(x, x).detach()
    assert_graphs(training)
    first = training.graphs[0].last
    training(x, x)
    # Nothing has changed.
    assert training.graphs[0].last is first
    change(layer, monkeypatch)
    expected = F.mse_loss(layer(x), x).detach()
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(training(x, x).detach(), expected)
    torch.testing.assert_close(training(x, x).detach(), expected)
    assert_graphs(training)


def test_what_a_loss_reads_is_seen(monkeypatch):
    x = torch.randn(4, 3)
    training = training_of(nn.Linear(3, 3), lambda a, b: F.mse_loss(a, b) * NUMBER)
    before = training(x, x).detach()
    monkeypatch.setitem(globals(), "NUMBER", 3.0)
    torch.testing.assert_close(training(x, x).detach(), before * 3)
    assert_graphs(training)


def test_what_the_class_of_a_layer_has_closed_over_is_seen():
    scale = 1.0

    class Closed(nn.Linear):
        def forward(self, x):
            return super().forward(x) * scale

    layer, x = Closed(3, 3), torch.randn(4, 3)
    training = training_of(layer)
    training(x, x)
    scale = 3.0
    torch.testing.assert_close(training(x, x).detach(), F.mse_loss(layer(x), x).detach())
    assert_graphs(training)


def test_zeros_among_arguments_have_signs():
    class Signed(nn.Linear):
        def forward(self, x):
            x, zero = x
            return sign(super().forward(x), zero)

    layer, x = Signed(3, 3), torch.randn(4, 3)
    training = training_of(layer)
    for zero in (0.0, -0.0, 0.0):
        expected = F.mse_loss(layer((x, zero)), x).detach()
        torch.testing.assert_close(training((x, zero), x).detach(), expected)
    assert_graphs(training)


COUNT = 0


def count(own, x):
    global COUNT
    COUNT += 1
    return x


def count_in_class(own, x):
    Settings.scale += 1
    return x


def count_in_parameter(own, x):
    own.layer.weight.scale += 1
    return x


def count_in_array(own, x):
    own.array[1] = x.detach()
    return x


@pytest.mark.parametrize(
    ("write", "look"),
    [
        (count, lambda own: COUNT),
        (count_in_class, lambda own: Settings.scale),
        (count_in_parameter, lambda own: own.layer.weight.scale),
        (count_in_array, lambda own: type(own.array[1])),
    ],
)
def test_what_forward_writes_keeps_a_stage_eager(write, look, monkeypatch):
    monkeypatch.setitem(globals(), "COUNT", 0)
    monkeypatch.setattr(Settings, "scale", 1.0)
    layer, x = Layer(write), torch.randn(4, 3)
    training = training_of(layer)
    with pytest.warns(UserWarning, match="attributes"):
        training(x, x)
    copied = Layer(write)
    counted = look(layer)
    monkeypatch.setitem(globals(), "COUNT", 0)
    monkeypatch.setattr(Settings, "scale", 1.0)
    for half in x.chunk(2):
        copied(half)
    assert counted == look(copied)
