"""A pipeline over several processes: the example."""

import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.support.fresh import METHOD, preload
from tests.support.size import soak, some
from torchgpipe._torch.dynamo import VERSION

if VERSION < (2, 13):
    pytest.skip("the runtime of PyTorch 2.13 or newer", allow_module_level=True)

from examples import across_processes

ROOT = Path(__file__).parent.parent.parent
#: Options with which the loss falls by a quarter.
SHORT = ["--epochs", "8", "--chunks", "3"]
#: In how many seconds a run is taken to hang.
TIMEOUT = 60

preload("torch._dynamo", "torch.distributed.pipelining")


def in_process(arguments):
    """Run the example in a process of a group, or kill it; return what it prints, too."""
    signal.alarm(TIMEOUT)
    torch.set_num_threads(1)
    with redirect_stdout(StringIO()) as printed:
        return across_processes.main(arguments), printed.getvalue()


@soak
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
    assert "processes: 2, layers of the stages: [3, 3], schedule: 1f1b" in found[0][1]
    assert found[1][1] == ""


@pytest.mark.parametrize("schedule", some(["fill_drain", "zbv"], ["zbv"]))
def test_example_alone(schedule, capsys):
    assert across_processes.main([*SHORT, "--schedule", schedule, "--checkpoint", "always"]) == 0
    assert "processes: 1" in capsys.readouterr().out


@pytest.mark.parametrize(("count", "expected"), [(2, "cuda:1"), (1, "cpu"), (0, "cpu")])
def test_each_process_has_its_own_device(count, expected, monkeypatch):
    chosen = []
    cuda = torch.device("cuda") if count else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert across_processes.place() == torch.device(expected)
    assert chosen == ([1] if count == 2 else [])
