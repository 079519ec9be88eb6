"""A mapping keeps its identity, and has what a module finds there while the module is computed."""

import threading
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchgpipe.mapped import exchanged
from torchgpipe.mapped.exchanged import Exchanged


def fetched(items):
    return {key: f"{x} here" for key, x in items.items()}


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
