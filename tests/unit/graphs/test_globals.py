"""Sources: which names the code of layers reads, as far as it is the user's own code."""

import json
import types
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import torchgpipe
from torchgpipe.graphs.globals import Sources, Variables, is_own, is_own_file, names_in

NUMBER, OTHER, NAMED, FAR = 1, [2], 3, 4
SETTINGS = types.ModuleType("tests_of_settings")
SETTINGS.scale, SETTINGS.unread = 1, 2


class Helper:
    factor, label = 1, "text"

    def __init__(self):
        self.start = FAR

    def apply(self):
        return NUMBER

    def aside(self):
        return NAMED


class Layer(nn.Module):
    """A layer whose ``forward`` does not name all."""

    def __init__(self):
        super().__init__()
        self.helper, self.size = Helper(), OTHER

    def forward(self, x):
        return self.helper.apply() * x * SETTINGS.scale


class Maker(nn.Module):
    """A layer that makes an object."""

    helper = None

    def forward(self, x):
        return Helper().apply() * x


def sources_of(layer):
    return Sources([("helper", layer.helper)], [type(layer)], {id(layer)})


def names_of(sources):
    return {name for x in sources.tables.values() for name in x.names}


def test_names():
    def function(x):
        import json.decoder

        return [NUMBER + json.decoder.scanner + x.real for _ in OTHER]

    found = names_in(function.__code__)
    assert found.variables == {"NUMBER", "OTHER"}
    assert {"decoder", "scanner", "real"} >= found.attributes >= {"scanner", "real"}
    assert found.modules == {"json.decoder"}


def test_what_is_followed():
    found = names_of(sources_of(Layer()))
    assert found == {"NUMBER", "SETTINGS", "scale", "factor"}
    # Whoever makes an object runs its __init__.
    assert names_of(sources_of(Maker())) == {"NUMBER", "Helper", "FAR", "factor"}


def test_a_file_beside_the_package_is_own():
    package = Path(torchgpipe.__file__).parent
    assert is_own_file(f"{package}_mine.py")
    assert not is_own_file(f"{package}/skip/tracker.py")


def test_what_is_own():
    assert all(map(is_own, (test_names, Helper, SETTINGS)))
    assert not any(map(is_own, (json, json.dumps, torch, nn.Linear, numpy, numpy.ones, is_own)))


@pytest.mark.parametrize("change", ["class", "function", "installed"])
def test_changes_by_identity(change, monkeypatch):
    def other(self):
        return 2

    sources = sources_of(Layer())
    assert sources.are_same()
    if change == "class":
        monkeypatch.setattr(Helper, "factor", 2)
    elif change == "function":
        monkeypatch.setattr(Helper, "apply", other)
    else:
        monkeypatch.setitem(globals(), "SETTINGS", json)
    assert not sources.are_same()


def test_annotations_that_python_makes_do_not_count():
    sources = sources_of(Layer())
    Helper.__annotations__ = {}
    assert sources.are_same()
    del Helper.__annotations__


@pytest.mark.parametrize("kind", ["class", "module"])
def test_variables_are_put_back(kind):
    class Owner:
        a = 1

    table = Owner.__dict__ if kind == "class" else {"a": 1, "__name__": "Owner"}
    variables = Variables(Owner if kind == "class" else table, table)
    variables.names |= {"a", "b"}
    before = variables.copy()
    if kind == "class":
        Owner.a, Owner.b = 2, 3
    else:
        table |= {"a": 2, "b": 3}
    variables.clear()
    variables.update(before)
    assert variables.copy() == before == {"a": 1}
    assert variables.owner == "Owner"
