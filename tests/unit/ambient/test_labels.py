"""Labels of what a thread computes, told to whoever observes."""

import threading

import pytest
import torch
from torch import nn

from torchgpipe.ambient import labels
from torchgpipe.ambient.labels import Label
from torchgpipe.ambient.notes import noted
from torchgpipe.partition.split import split_module

CELL = Label("F", 1, 2)


@pytest.fixture
def told(monkeypatch):
    """The labels that an observer is told."""
    found = []
    monkeypatch.setattr(labels, "observer", found.append)
    return found


def test_nobody_observes():
    assert labels.of("F", 0, 0) is None
    labels.put_layer("0", "Linear")
    assert labels.current.label is None
    assert labels.around(max, None) is max
    with labels.within(None), noted("where", labels.of("F", 0, 0)):
        assert labels.current.label is None


def test_labels_are_put_back(told):
    inner = labels.of("copy", 1, 2, 3)
    with labels.within(labels.of("F", 1, 2)), pytest.raises(KeyError), labels.within(inner):
        raise KeyError
    assert told == [CELL, Label("copy", 1, 2, 3), CELL, None]
    assert labels.current.label is None


def test_a_function_with_a_label(told):
    run = labels.around(lambda x, *, y: (x, y, labels.current.label), CELL)
    assert run(1, y=2) == (1, 2, CELL)
    assert told == [CELL, None]


def test_a_note_with_a_label(told):
    with pytest.raises(KeyError), noted("where", CELL):
        assert labels.current.label == CELL
        raise KeyError
    assert told == [CELL, None]


def test_each_thread_has_its_own(told):
    seen = []
    with labels.within(CELL):
        thread = threading.Thread(target=lambda: seen.append(labels.current.label))
        thread.start()
        thread.join()
    assert seen == [None]


def test_layers_of_a_partition(told):
    (partition,) = split_module(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [2])
    with labels.within(CELL):
        partition(torch.rand(2, 2))
    first = CELL._replace(layer="0", layer_type="Linear")
    second = CELL._replace(layer="1", layer_type="ReLU")
    assert told == [CELL, first, second, CELL, None]
    # A partition that somebody calls is no cell.
    partition(torch.rand(2, 2))
    assert len(told) == 5


def test_an_observation_that_ends_within_a_cell(told, monkeypatch):
    with labels.within(CELL):
        monkeypatch.setattr(labels, "observer", None)
        labels.put_layer("0", "Linear")
    assert told == [CELL]
    assert labels.current.label is None
