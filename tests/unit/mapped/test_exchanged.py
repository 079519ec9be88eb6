"""A mapping keeps its identity, and has what a module finds there while the module is computed."""

import threading
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from torchgpipe.mapped import exchanged
from torchgpipe.mapped.exchanged import Exchanged, mappings_of


def fetched(items):
    return {key: f"{x} here" for key, x in items.items()}


def test_mappings():
    mapping, inner = UserDict(), UserDict()
    plain = SimpleNamespace(a=1, inner=[inner])
    full = SimpleNamespace(a=torch.rand(1), itself=None)
    full.itself = full
    found = mappings_of((1, {}, mapping, plain), {"a": [mapping], "b": mapping, "c": full})
    assert [*map(id, found)] == [*map(id, (mapping, inner, vars(full)))]


def test_what_is_written_stays_and_what_was_there_comes_back():
    mapping = UserDict(kept="a", replaced="b", deleted="c")

    def module():
        assert mapping == {"kept": "a here", "replaced": "b here", "deleted": "c here"}
        mapping["replaced"] = "new"
        mapping["added"] = None
        del mapping["deleted"]
        return 1

    assert Exchanged([mapping], fetched, nullcontext()).call(module) == 1
    assert mapping == {"kept": "a", "replaced": "new", "added": None}


def test_what_was_there_comes_back_after_a_failure():
    mapping = UserDict(a="a")
    with pytest.raises(ZeroDivisionError):
        Exchanged([mapping], fetched, nullcontext()).call(lambda: 1 / 0)
    assert mapping == {"a": "a"}


def test_a_recomputation_finds_what_the_first_one_found_and_leaves_no_trace(monkeypatch):
    mapping, seen = UserDict(a="a"), []
    found = Exchanged([mapping], fetched, nullcontext())

    def module():
        seen.append({**mapping})
        mapping["b"] = len(seen)

    found.call(module)
    mapping.update(a="other", c="c")
    monkeypatch.setattr(exchanged, "is_recomputing", lambda: True)
    found.call(module)
    assert seen == [{"a": "a here"}] * 2
    assert mapping == {"a": "other", "b": 1, "c": "c"}


def test_recomputations_take_turns(monkeypatch):
    monkeypatch.setattr(exchanged, "is_recomputing", lambda: True)
    mapping, both = UserDict(a="a"), threading.Barrier(2)
    lock = threading.RLock()

    def meet():
        # With the lock nobody else comes.
        with pytest.raises(threading.BrokenBarrierError):
            both.wait(0.1)

    with ThreadPoolExecutor(2) as threads:
        calls = [Exchanged([mapping], fetched, lock).call for _ in range(2)]
        for task in [threads.submit(call, meet) for call in calls]:
            task.result()
