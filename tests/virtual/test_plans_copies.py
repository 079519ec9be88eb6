"""Plans count the copies that the compute streams make, and no others."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.planning import unet
from torchgpipe import plan, trace
from torchgpipe.testing import observe


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble_h1"])
def test_clones_of_what_leaves(devices, schedule):
    """Clone on the stream that computes what leaves it, and no gradients that are views."""
    layers, x, y = unet(0, 8), *torch.rand(2, 16, 3, 16, 16)
    costs = {"convolution": 5, "convolution_backward": 10, "copy_": 1}
    links = {(0, 1): 1e9, (1, 0): 1e9}
    options = {"devices": devices[:2], "loss": F.mse_loss, "targets": (y,), "chunks": [4]}
    with observe(costs=costs, bandwidth=links):
        plans = plan(layers, x, **options, timeout=0)
        candidate = next(c for c in plans.candidates if c.schedule == schedule)
        training = candidate.wrap(layers)
        x = x.to(devices[0])
        with trace(training) as timeline:
            training(x, y).backward()
    # Each loss is copied once more, so that nothing of its graph is kept.
    assert candidate.time + 4 == pytest.approx(timeline.step().makespan)
