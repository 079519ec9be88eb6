"""Dry runs in processes of their own."""

import os
from multiprocessing import get_context

from benchmarks.alone import WARM, alone, warmed
from tests.support.fresh import METHOD


def here():
    return {"process": os.getpid()}


def test_a_row_has_a_process_of_its_own(monkeypatch):
    # A process that does not import torch anew.
    monkeypatch.setattr("benchmarks.alone.get_context", lambda _: get_context(METHOD))
    row = alone(here)
    assert row["process"] != os.getpid()
    assert row["rss"] > 0


def test_the_third_step_has_all_micro_batches():
    seen = []
    step = warmed(seen.append, 8)
    for _ in range(3):
        step()
    assert seen == [WARM, WARM, 8]
