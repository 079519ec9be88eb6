"""Data parallelism: the example, and what two processes compute together."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import data_parallel
from tests import pairs

ROOT = Path(__file__).parent.parent.parent
#: What is enough for the loss to fall to half.
SHORT = ["--rows", "384", "--epochs", "20", "--lr", "0.02"]


@pytest.fixture(scope="module")
def outcomes():
    return pairs.run([*pairs.CASES])


@pytest.mark.parametrize("name", pairs.CASES)
def test_pair(name, outcomes):
    assert not any(outcomes[name]), "\n".join(outcomes[name])


def test_example_alone(capsys):
    assert data_parallel.main(SHORT) == 0
    assert data_parallel.main(["--rows", "192", "--epochs", "1"]) == 1
    assert "Not as it should be" in capsys.readouterr().out


def test_a_difference_is_noticed(monkeypatch):
    """Of gradients that are not exchanged: here those of the model alone, of half of the rows."""
    step = data_parallel.step

    def halved(model, optimizer, batches):
        if isinstance(model, data_parallel.DistributedDataParallel):
            batches = [[x[: len(x) // 2] for x in batch] for batch in batches]
        return step(model, optimizer, batches)

    monkeypatch.setattr(data_parallel, "step", halved)
    assert data_parallel.main(SHORT) == 1


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
