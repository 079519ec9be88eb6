"""The benchmark of the host as a bottleneck, at tiny size, and the bound that it states."""

import json

import pytest

from benchmarks.__main__ import main
from benchmarks.suites.host_bound import bound, shown

pytestmark = pytest.mark.usefixtures("prompt")


def makespan(m, n, host, device):
    """Time of a forward, where one thread issues a cell after another in the order of ticks."""
    issued, free, done = 0.0, [0.0] * n, {}
    for k in range(m + n - 1):
        for j in range(max(0, k - m + 1), min(n, k + 1)):
            issued += host
            start = max(issued, free[j], done.get((k - j, j - 1), 0))
            free[j] = done[k - j, j] = start + device
    return max(free)


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_from_the_bound_on_devices_never_wait_for_the_host(m, n):
    host = 0.25
    least = bound(n, {"pipeline": {"min": 1e3 * host}})
    for device in (least, 2 * least):
        # The first cell must be issued; after that the host is ahead.
        assert makespan(m, n, host, device) == host + (m + n - 1) * device


def test_host_bound(tmp_path, capsys):
    path = tmp_path / "host.json"
    few = ["--n", "2", "--m", "2", "--seconds", "0", "--steps", "1", "--devices", "cpu"]
    few += ["--models", "tiny layers", "gpt", "--modes", "inference", "always"]
    few += ["--against", f"none={tmp_path}"]
    assert main(["host_bound", *few, "--output", str(path)]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert [(row["model"], row["mode"]) for row in result["rows"]] == [
        (model, mode) for model in ("tiny layers", "gpt") for mode in ("inference", "always")
    ]
    text = capsys.readouterr().out
    for row in result["rows"]:
        assert {"plain", "pipeline"} == row["rivals"]["ours"].keys()
        least = bound(row["n"], row["rivals"]["ours"])
        assert f"| {shown(least)} |".replace(" ", "") in text.replace(" ", "")
    assert list(result["left_out"]) == ["none on cpu"]
