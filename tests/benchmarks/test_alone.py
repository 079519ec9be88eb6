"""Dry runs in processes of their own."""

import os

from benchmarks.alone import WARM, alone, warmed


def here():
    return {"process": os.getpid()}


def test_a_row_has_a_process_of_its_own():
    row = alone(here)
    assert row["process"] != os.getpid()
    assert row["rss"] > 0


def test_the_third_step_has_all_micro_batches():
    seen = []
    step = warmed(seen.append, 8)
    for _ in range(3):
        step()
    assert seen == [WARM, WARM, 8]
