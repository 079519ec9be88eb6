"""Buffers that layers only read, as a recomputation finds them."""

import pytest
import torch
from torch import nn

from torchgpipe.recompute import read_only
from torchgpipe.recompute.read_only import ReadOnly


def layer():
    made = nn.Module()
    made.register_buffer("table", torch.arange(3.0))
    made.register_buffer("missing", None)
    return made


def places(made):
    return [(made, "table"), (made, "missing")]


def test_a_small_one_is_as_it_was():
    made = layer()
    found = ReadOnly(places(made))
    assert found.as_they_were() == []
    made.table.add_(1)
    ((place, copy),) = found.as_they_were()
    assert place == (made, "table")
    assert copy.tolist() == [0, 1, 2]
    assert found.changed() == [((made, "table"), made.table)]


def test_other_memory_is_a_change():
    made = layer()
    found = ReadOnly(places(made))
    made.table.data = made.table + 1
    assert found.as_they_were()[0][1].tolist() == [0, 1, 2]


def test_one_that_is_replaced_has_not_changed_itself():
    made = layer()
    found = ReadOnly(places(made))
    made.table = torch.zeros(3)
    assert found.as_they_were() == []
    assert len(found.changed()) == 1


@pytest.mark.parametrize("after", [False, True])
def test_a_large_one(monkeypatch, after):
    """A layer may begin to change it in a step; what others change after that is an error."""
    monkeypatch.setattr(read_only, "SMALL", 4)
    made = layer()
    found = ReadOnly(places(made))
    if after:
        found.settle()
    made.table.add_(1)
    if after:
        with pytest.raises(RuntimeError, match=r"Module, buffer: table, bytes: 12, large: more"):
            found.as_they_were()
    else:
        ((_, now),) = found.as_they_were()
        assert now is made.table
        found.settle()
        assert len(found.as_they_were()) == 1
