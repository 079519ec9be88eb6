"""Sources: which names the code of layers reads, as far as it is the user's own code."""

import json
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import torchgpipe
from torchgpipe.graphs.globals import Variables, is_own, is_own_file


class Own:
    """A class of a user's."""


def test_a_file_beside_the_package_is_own():
    package = Path(torchgpipe.__file__).parent
    assert is_own_file(f"{package}_mine.py")
    assert not is_own_file(f"{package}/skip/tracker.py")


def test_what_is_own():
    assert all(map(is_own, (test_what_is_own, Own)))
    assert not any(map(is_own, (json, json.dumps, torch, nn.Linear, numpy, numpy.ones, is_own)))


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
