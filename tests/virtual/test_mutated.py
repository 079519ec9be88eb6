"""Each guard is needed: a test fails without it."""

import importlib
import inspect

import pytest
import torch

from tests.distributed.guarded import MUTANTS as ELSEWHERE
from tests.virtual import (
    guarded,
    guarded_graphs,
    guarded_kept,
    guarded_mapped,
    guarded_offload,
    guarded_schedules,
)
from tests.virtual.mutants import by_turns, guards, mutated
from torchgpipe._torch.dynamo import VERSION

GUARDED = (
    *(guarded, guarded_schedules, guarded_mapped),
    *(guarded_graphs, guarded_kept, guarded_offload),
)
MUTANTS = {name: x for some in GUARDED for name, x in some.MUTANTS.items()}
TESTS = {name: x for some in GUARDED for name, x in some.TESTS.items()}

#: Guards that versions of PyTorch before these do without.
SINCE = {"casts of both runs": (2, 12)}


def judge(test, devices):
    """Run a test, in all checkpoint modes if it takes one."""
    module, function, arguments = TESTS[test]
    check = getattr(importlib.import_module(f"tests.{module}"), function)
    names = inspect.signature(check).parameters
    for mode in ("never", "except_last", "always") if "mode" in names else [None]:
        with pytest.MonkeyPatch.context() as patch:
            given = {"devices": devices, "device": devices[0], "mode": mode, "monkeypatch": patch}
            given |= {"places": devices[:2]} | arguments
            check(**{name: value for name, value in given.items() if name in names})


CASES = [(name, test) for name, (_, *tests) in MUTANTS.items() for test in tests]


@pytest.fixture
def streams(devices):
    """Put the current streams back, which some mutants leave behind."""
    before = [torch.accelerator.current_stream(device) for device in devices]
    yield
    for stream in before:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(0)


# Which does not count as a failure of a test that ignores it.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize(("name", "test"), by_turns(CASES))
def test_a_test_fails_without(devices, name, test):
    if SINCE.get(name, (0,)) > VERSION:
        pytest.skip(f"PyTorch {VERSION} needs no such guard")
    change, *_ = MUTANTS[name]
    # A race that needs a host which stumbles at the right moment may need several attempts.
    for _ in range(100):
        try:
            with mutated(name, change):
                judge(test, devices)
        # PyTorch 2.11 cannot trace what draws from a generator.
        except (AssertionError, NotImplementedError, UserWarning, pytest.fail.Exception):
            return
    pytest.fail(f"{test} passes")


@pytest.mark.parametrize("test", ["limit", "shifted", "last use"])
def test_what_finds_it_passes_otherwise(devices, test):
    """A test that finds a mutant passes with the plain package."""
    with mutated("waiting", ("", "")):
        judge(test, devices)


def test_every_guard_has_a_mutant():
    assert set(guards()) == MUTANTS.keys() | ELSEWHERE.keys()


def test_a_marker_without_its_line_is_an_error():
    fragment = ("nothing of the kind", "")
    with pytest.raises(LookupError, match=fragment[0]), mutated("waiting", fragment):
        pass
