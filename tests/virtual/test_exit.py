"""The process ends promptly, with its main thread's status, and with work on accelerators."""

import os
import signal

import pytest

from tests.support.exits import PROGRAMS, endings
from tests.support.size import soak, some

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(scope="module")
def ended():
    # That of the dry run takes as long as all others.
    names = [name for name in PROGRAMS if name.endswith("virtual")]
    return endings(some(names, [name for name in names if name != "refused, virtual"]))


@soak
def test_many_live_wrappers(ended):
    assert ended["live, virtual"] == [0, "end\n", ""]


def test_interrupted_within_a_cell(ended):
    status, out, err = ended["interrupted amid compute, virtual"]
    assert err.endswith("\nKeyboardInterrupt\n")
    assert (status, out) == (-signal.SIGINT, "")


def test_ended_by_an_error(ended):
    status, out, err = ended["fail, virtual"]
    assert err.endswith("KeyError: 'mine'\n")
    assert (status, out) == (1, "")


def test_forked_and_ended_quietly(ended):
    assert ended["fork, virtual"] == [0, "", ""]


@soak
def test_refused_a_dry_run(ended):
    status, out, err = ended["refused, virtual"]
    assert out.startswith("a dry run takes 32 TiB of addresses")
    assert (status, out.splitlines()[1:], err) == (0, ["3.0"], "")
