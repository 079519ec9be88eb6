"""Data parallelism: the example, and computations of two processes together."""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from examples import data_parallel
from tests.support.fresh import METHOD
from tests.support.pairs import cases
from tests.support.size import soak

ROOT = Path(__file__).parent.parent.parent
#: Options with which the loss falls to half.
SHORT = ["--rows", "384", "--epochs", "20", "--lr", "0.02"]


@pytest.fixture(scope="module")
def outcomes():
    return cases.run([*cases.CASES])


@pytest.fixture
def machine(monkeypatch):
    """Simulate the devices of a machine for one of two processes; return the devices it chooses."""

    def machine(count, process):
        chosen = []
        cuda = torch.device("cuda") if count else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        monkeypatch.setenv("LOCAL_RANK", str(process))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        return chosen

    return machine


@pytest.mark.parametrize("name", cases.CASES)
def test_pair(name, outcomes):
    assert not any(outcomes[name]), "\n".join(outcomes[name])


def test_example_alone(capsys):
    assert data_parallel.main(SHORT) == 0
    assert data_parallel.main(["--rows", "192", "--epochs", "1"]) == 1
    assert "Not as it should be" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "process", "expected"), [(4, 0, (0, 1)), (4, 1, (2, 3))])
def test_each_process_has_its_own_devices(count, process, expected, machine):
    chosen = machine(count, process)
    assert data_parallel.places() == [torch.device("cuda", j) for j in expected]
    assert chosen == [expected[0]]


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("count", [0, 3])
def test_machine_with_too_few_devices(count, process, machine):
    chosen = machine(count, process)
    assert data_parallel.places() == [torch.device("cpu")] * 2
    assert not chosen


def test_a_difference_is_noticed(monkeypatch):
    """Gradients that processes do not exchange, here of half of the rows, are noticed."""
    step = data_parallel.step

    def halved(model, optimizer, batches):
        if isinstance(model, data_parallel.DistributedDataParallel):
            batches = [[x[: len(x) // 2] for x in batch] for batch in batches]
        return step(model, optimizer, batches)

    monkeypatch.setattr(data_parallel, "step", halved)
    assert data_parallel.main(SHORT) == 1


def in_process(arguments):
    """Run the example in a process of a group; return what it prints, too."""
    torch.set_num_threads(1)
    with redirect_stdout(StringIO()) as printed:
        return data_parallel.main(arguments), printed.getvalue()


def test_example_in_two_processes():
    """Processes run as torchrun starts them, but without two more imports of torch."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="example",
        max_restarts=0,
        monitor_interval=0.05,
        start_method=METHOD,
    )
    found = elastic_launch(config, in_process)(SHORT)
    assert [status for status, _ in found.values()] == [0, 0]
    assert "processes: 2" in found[0][1]


@soak
def test_example_under_torchrun():
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*program, "--nproc-per-node", "2", "-m", "examples.data_parallel", *SHORT],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "processes: 2" in done.stdout
