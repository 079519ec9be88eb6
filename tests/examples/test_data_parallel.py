"""Data parallelism: the example, and computations of two processes together."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from examples import data_parallel
from tests.support.fresh import METHOD
from tests.support.pairs import cases

ROOT = Path(__file__).parent.parent.parent
#: Options with which the loss falls to half.
SHORT = ["--rows", "192", "--epochs", "16", "--lr", "0.03"]


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
    assert "Not as it should be" not in capsys.readouterr().out


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
