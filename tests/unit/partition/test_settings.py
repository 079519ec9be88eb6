"""The settings that all wrappers have."""

import copy
import pickle
from collections import UserList

import pytest
from torch import nn

from tests.support.helpers import linears
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss

MIXED = ["always", "never", "except_last"]


def wrap(checkpoint="except_last"):
    return GPipe(linears(1, 1, 1, 1), [1] * 3, devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)


def mapped(checkpoint="except_last"):
    return MappedGPipe(linears(1, 1), {"": "cpu"}, chunks=2, checkpoint=checkpoint)


@pytest.mark.parametrize("kind", [list, tuple, UserList])
def test_a_mode_for_each_partition(kind):
    model = wrap(kind(MIXED))
    assert model.checkpoint == MIXED
    assert type(model.checkpoint) is list
    model.checkpoint = kind(MIXED[::-1])
    assert model.checkpoint == MIXED[::-1]
    model.checkpoint = "never"
    assert model.checkpoint == "never"


def test_lists_are_the_users():
    given = [*MIXED]
    model = wrap(given)
    given.clear()
    model.checkpoint.clear()
    assert model.checkpoint == MIXED


def test_words_of_another_class():
    class Mode:
        def __str__(self):
            return "always"

    assert wrap([Mode(), "never", "never"]).checkpoint == ["always", "never", "never"]


@pytest.mark.parametrize("modes", [[], ["never"], ["never"] * 4])
def test_wrong_length(modes):
    model = wrap(MIXED)
    for change in (lambda: wrap(modes), lambda: setattr(model, "checkpoint", modes)):
        with pytest.raises(
            ValueError, match=r"one for each partition \(checkpoint: \[.*partitions: 3\).*one word"
        ):
            change()
    assert model.checkpoint == MIXED


@pytest.mark.parametrize("word", ["some", None, True, ["never"]])
def test_unknown_word_in_a_list(word):
    with pytest.raises(ValueError, match=r"one of 'always'"):
        wrap(["never", word, "always"])


@pytest.mark.parametrize("modes", [{"never"}, {"never": 1}, 3])
def test_what_has_no_order_is_no_list(modes):
    with pytest.raises(ValueError, match=r"one of 'always'"):
        wrap(modes)


def test_no_partition():
    model = GPipe(nn.Sequential(), [], devices=[], checkpoint=[])
    assert model.checkpoint == []


def test_device_map_has_one_mode():
    with pytest.raises(ValueError, match=r"one checkpoint mode for all.*\['never'\].*GPipe"):
        mapped(["never"])
    model = mapped()
    with pytest.raises(ValueError, match=r"one checkpoint mode for all"):
        model.checkpoint = ("never",)
    assert model.checkpoint == "except_last"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(duplicate):
    model = wrap(MIXED)
    training = ScheduledLoss(model, nn.MSELoss())
    for twin in (duplicate(model), duplicate(training).model):
        assert twin.checkpoint == MIXED
        twin.checkpoint = "never"
    assert model.checkpoint == MIXED
