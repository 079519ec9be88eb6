"""Layers see what the caller has set: the same tests on virtual accelerators."""

import pytest
import torch

# All of its tests, with other places.
from tests.behaviour.test_modes import *  # noqa: F403
from tests.behaviour.test_modes import made, rows
from tests.support.helpers import wrap


@pytest.fixture(params=[[0, 1], [0, 0], [0, "cpu"]], ids=str)
def places(request, devices):
    return [x if x == "cpu" else devices[x] for x in request.param]


def test_profiler_sees_layers_of_other_threads(devices):
    """The profiler needs a setting for that, as in ``docs/how_it_works.rst``."""
    model = wrap(made(), [devices[0], "cpu"], "never")
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    counts = []
    for options in ({}, {"experimental_config": config}):
        model(rows(model))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True, **options
        ) as profile:
            model(rows(model))
        counts.append(sum(x.count for x in profile.key_averages() if x.key == "aten::addmm"))
    # A virtual accelerator passes operators on to the CPU, which are seen, too.
    assert counts[0] == 0
    assert counts[1] >= 6
