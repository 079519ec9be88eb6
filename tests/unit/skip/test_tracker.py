"""Trackers of skips: what was stashed, and which tracker a thread uses."""

import threading

import pytest
import torch

from torchgpipe.skip import Namespace
from torchgpipe.skip.tracker import SkipTracker, current_skip_tracker, use_skip_tracker
from torchgpipe.values.microbatch import Batch

X = (None, "x")


def test_pop_lets_go_of_the_value():
    tracker = SkipTracker()
    tracker.save(X, value := object())
    assert tracker.load(X) is value
    with pytest.raises(RuntimeError, match=r"earlier layer before it is popped \(skip: 'x'\)"):
        tracker.load(X)


def test_error_names_the_namespace():
    space = Namespace()
    with pytest.raises(RuntimeError, match=rf"skip: 'x' in {space}"):
        SkipTracker({X: 1}).load((space, "x"))


def test_skips_of_a_micro_batch():
    value = {"a": [torch.ones(2), None], "b": 3}
    batch = Batch(torch.zeros(1)).with_skips(SkipTracker({X: value}).parts())
    found = SkipTracker.of(batch).load(X)
    assert found["a"][0] is value["a"][0]
    assert found == value
    assert found is not value
    assert SkipTracker.of(Batch(torch.zeros(1))).values == {}


def test_each_thread_has_a_tracker():
    found = []
    thread = threading.Thread(target=lambda: found.append(current_skip_tracker()))
    with use_skip_tracker(tracker := SkipTracker()):
        thread.start()
        thread.join()
        assert current_skip_tracker() is tracker
    assert found[0] is not tracker


def test_previous_tracker_comes_back_after_an_exception():
    with use_skip_tracker(outer := SkipTracker()):
        with pytest.raises(KeyError), use_skip_tracker(SkipTracker()):
            raise KeyError
        assert current_skip_tracker() is outer
