"""The tutorial runs as its pages stand, prints what they show, and trains in two processes."""

import re
import runpy
import signal
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.fresh import METHOD, preload
from torchgpipe._torch.dynamo import VERSION
from torchgpipe.planner.blocks import timed
from torchgpipe.planner.problem import Problem

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("tutorial*.rst"))
#: A block of code that runs, and what it prints where nothing but that stands after it.
BLOCK = re.compile(
    r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)(?:::\n\n((?:   .*\n|\n)+))?", re.MULTILINE
)
#: In how many seconds a run is taken to hang.
TIMEOUT = 60

preload("torch._dynamo", "torch.distributed.pipelining")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Measure models twice, and not for a second."""
    monkeypatch.setattr("torchgpipe.planner.maps.timed", partial(timed, timeout=0))
    monkeypatch.setattr("torchgpipe.planner.auto.Problem", partial(Problem, timeout=0))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages(page):
    """Each page is one program, which imports what it needs itself."""
    names, shown = {"__name__": page.stem}, 0
    for code, expected in BLOCK.findall(page.read_text("utf-8")):
        with redirect_stdout(StringIO()) as printed:
            exec(compile(dedent(code), str(page), "exec"), names)
        if expected:
            assert printed.getvalue().strip() == dedent(expected).strip()
            shown += 1
    assert shown == 1
    assert names["first"] == "cpu"


@pytest.fixture
def script(tmp_path):
    """The two files that the tutorial has a reader make."""
    text = (ROOT / "docs/tutorial.rst").read_text("utf-8")
    blocks = [code for code, _ in BLOCK.findall(text) if code.startswith("   # gpt.py\n")]
    assert len(blocks) == 3
    (tmp_path / "gpt.py").write_text("\n\n".join(map(dedent, blocks)), "utf-8")
    (train,) = re.findall(r":caption: train.py\n\n((?:   .*\n|\n)+)", text)
    (tmp_path / "train.py").write_text(dedent(train), "utf-8")
    return tmp_path / "train.py"


def shown():
    """Lines that the processes print, in order of their numbers."""
    text = (ROOT / "docs/tutorial.rst").read_text("utf-8")
    return [line.strip() for line in text.splitlines() if line.startswith("   process ")]


def in_process(script):
    """Run the script in a process of a group, or kill it; return what it prints."""
    signal.alarm(TIMEOUT)
    torch.set_num_threads(1)
    sys.path.insert(0, str(script.parent))
    with redirect_stdout(StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue().strip()


needs_runtime = pytest.mark.skipif(VERSION < (2, 13), reason="the runtime of PyTorch 2.13 or newer")


@needs_runtime
def test_two_processes(script):
    """Processes run as torchrun starts them, but without two more imports of torch."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="tutorial",
        max_restarts=0,
        monitor_interval=0.05,
        start_method=METHOD,
    )
    found = elastic_launch(config, in_process)(script)
    assert [found[rank] for rank in range(2)] == shown()
