"""Fixtures and settings of all tests."""

import gc
import os
import re
import signal
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from textwrap import dedent

import hypothesis
import pytest
import torch

from tests.support.fresh import popen
from tests.support.helpers import MODES
from tests.support.size import SOAK, rotate, some
from tests.support.turns import takes_part
from torchgpipe.devices.streams import accelerators
from torchgpipe.planner import sandbox

# The same examples in every run; `make test HYPOTHESIS=explore` looks for new ones.
hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=some(100, 25)
)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS", "default"))

# Small operators are faster alone, and so are two test processes side by side.
torch.set_num_threads(1)

VIRTUAL = Path(__file__).resolve().parent / "virtual"

#: The CPU, and one accelerator where there is one.
DEVICES = [torch.device("cpu"), *accelerators()[:1]]


def pytest_ignore_collect(collection_path, config):
    """Leave tests on virtual accelerators to a process of their own, which names their folder."""
    asked = [Path(config.invocation_params.dir, name.split("::")[0]) for name in config.args]
    if collection_path == VIRTUAL and not any(x.resolve().is_relative_to(VIRTUAL) for x in asked):
        return True
    return None


def pytest_collection_modifyitems(config, items):
    """Take few combinations of parameters, and files by turns, unless asked for by name."""
    if SOAK or any("[" in name for name in config.args):
        return
    items[:], dropped = rotate(items)
    if not any(".py" in name for name in config.args):
        dropped += [x for x in items if not takes_part(x.path)]
        items[:] = [x for x in items if takes_part(x.path)]
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish():
    """Exempt imported modules from the garbage collector, since they live on."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def untimed():
    """Have PyTorch's compiler not time its guards, for which it flushes all caches: 80 ms each."""
    if "torch._dynamo.guards" in sys.modules:
        sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Exempt what the tests of a module have imported, too."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    # torch.manual_seed takes a millisecond, for accelerators that are not there.
    torch.default_generator.manual_seed(0)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed_all(0)


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    """Have balance="auto" measure layers for a twentieth of the seconds that users give it."""
    monkeypatch.setattr(sandbox, "monotonic", lambda: 20 * time.monotonic())


@pytest.fixture(params=DEVICES, ids=str)
def device(request):
    """A device to compute on."""
    return request.param


@pytest.fixture(params=MODES)
def mode(request):
    """A checkpoint mode."""
    return request.param


@pytest.fixture
def prompt(monkeypatch):
    """Make benchmarks fork the processes of rivals from one that has imported torch."""
    monkeypatch.setattr("subprocess.Popen", popen)


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise, even where tests run in the background and would ignore it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def run():
    """Run the code blocks of a file, and return their names.

    What stands after the line ``This prints::`` is compared with what the block before it printed,
    whatever the ends of lines. A page that has such a line has one after each block that prints.
    A page runs from top to bottom as it stands, with no names but its own.
    """

    def run(file):
        indented = r"((?:   .*\n|\n)+)"
        text = file.read_text("utf-8")
        blocks = re.findall(
            rf"\.\. code-block:: python\n\n{indented}(?:This prints::\n\n{indented})?", text
        )
        assert blocks
        names = {"__name__": file.stem}
        for block, expected in blocks:
            with redirect_stdout(StringIO()) as printed:
                exec(compile(dedent(block), str(file), "exec"), names)
            if "\nThis prints::\n" in text:
                assert printed.getvalue().split() == expected.split()
            print(printed.getvalue(), end="")
        return names

    return run
