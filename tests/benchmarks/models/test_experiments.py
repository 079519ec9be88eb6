"""The papers' experiments can be built, at their size and at one that a CPU can do."""

import pytest
import torch

from benchmarks.models.experiments import MEMORY, SCALE, SPEED, build, samples, scaled
from tests.support.size import soak

EVERY = [x for listed in (*SPEED.values(), *MEMORY.values()) for x in listed]


@pytest.mark.parametrize("name", [pytest.param("amoebanetd", marks=soak), "resnet101"])
def test_scaled_models_have_as_many_layers(name):
    experiment = SPEED[name][-1]
    small = scaled(experiment, *SCALE)
    with torch.device("meta"):
        layers, fewer = build(experiment.model), build(small.model)
        output = fewer(samples(small.model, small.size, small.batch, "meta"))
    assert len(layers) == len(fewer) >= experiment.n
    assert output.shape[0] == small.batch == 8
    # Classes and channels alike.
    of_last = [sum(map(torch.numel, x.parameters())) for x in (layers[-1], fewer[-1])]
    of_all = [sum(map(torch.numel, x.parameters())) for x in (layers, fewer)]
    assert 16**2 * 0.8 < of_all[0] / of_all[1] < 16**2 * 1.2
    assert of_last[1] / of_all[1] < 0.2


def test_there_are_no_more_micro_batches_than_samples():
    for experiment in EVERY:
        small = scaled(experiment, 16, 64, 8)
        assert (small.m is None) == (experiment.m is None)
        assert (small.m or 1) <= small.batch <= experiment.batch
        kept = [(x.name, x.n, x.mode) for x in (small, experiment)]
        assert kept[0] == kept[1]
