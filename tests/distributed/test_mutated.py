"""Each guard that needs several processes is needed: a case fails without it."""

import os
import threading
from importlib import import_module

import pytest

from tests.distributed.guarded import MUTANTS
from tests.virtual.mutants import by_turns, mutated


def judge(group, guard):
    """Run a case without a guard; return whether it fails in this process."""
    change, case, _, arguments = MUTANTS[guard]
    with mutated(guard, change):
        module, name = case.split(":")
        function = getattr(import_module(f"tests.distributed.{module}"), name)
        try:
            function(group, *arguments)
        except (AssertionError, RuntimeError, KeyError, pytest.fail.Exception):
            # The others may wait for this process, until it has ended.
            threading.Timer(1, os._exit, [0]).start()
            return True
    return False


@pytest.mark.parametrize("guard", by_turns([(guard,) for guard in MUTANTS]))
def test_a_case_fails_without(guard, processes):
    # A message that is overwritten may have left just in time.
    for _ in range(5):
        found = processes.run(judge, MUTANTS[guard][2], guard)
        processes.stop()
        if any(found):
            return
    pytest.fail("the case passes")
