"""Public projects' models train by the device map "auto", as the plain models do, and overlap."""

from functools import partial

import pytest

from benchmarks.models.projects import PROJECTS
from benchmarks.simulate.projects import M, measure
from tests.support.helpers import MODES
from tests.support.size import some
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import timed

pytestmark = pytest.mark.usefixtures("one_round")

#: The model that a test run takes alone.
FEW = ["Perceiver, tied"]

#: How much longer a step may take than one of stages that are equally long.
SLACK = 1.03


# Weights are used on the streams of several visits.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.full
@pytest.mark.parametrize("n", some([2, 4], [4]))
@pytest.mark.parametrize("name", some([*PROJECTS], FEW))
def test_gradients_and_makespan(devices, monkeypatch, name, n):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    for found in measure(name, devices[:n], some(MODES, ["never"])):
        assert not found["races"]
        assert found["error"] < 1e-4
        assert len(found["places"]) == n
        if found["mode"] == "never":
            # With several threads the host's timing plays a part.
            slack = SLACK + 0.25 * PROJECTS[name].waits
            assert found["ms"] <= slack * (M + n - 1) / M * found["busiest"]
            assert found["one"] > 1.5 * found["ms"]
