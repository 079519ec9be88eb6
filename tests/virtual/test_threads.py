"""Several wrappers on accelerators: in threads, and one after another."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, wrap
from tests.support.long_runs import run_in_threads

WIDTH = 4


@pytest.fixture(params=["caller", "workers"])
def issuer(request, monkeypatch):
    """Make the caller issue the cells of most steps, or workers those of all."""
    monkeypatch.setattr(
        "torchgpipe.engine.workers.has_streams", lambda device: request.param == "caller"
    )


def layers(between=None):
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), between or nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    ).double()


class Elsewhere(nn.Module):
    """A layer that calls another model on any devices, which is none of its own layers."""

    def __init__(self, model):
        super().__init__()
        self.model = (model,)

    def forward(self, x):
        return self.model[0](x.to(self.model[0].devices[0])).to(x.device)


def found(model, input, parameters=None):
    """The output of a model, and its gradients, on the CPU."""
    output = model(input)
    leaves = [input, *(parameters or model.parameters())]
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    return [x.detach().cpu() for x in (output, *gradients)]


def batch(device="cpu"):
    torch.manual_seed(0)
    return torch.rand(6, WIDTH, dtype=torch.double).to(device).requires_grad_()


@pytest.mark.usefixtures("issuer")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("places", [[(0, 1)] * 3, [(0, 1), (1, 2), (2, 0)]], ids=str)
def test_wrappers_in_several_threads(devices, mode, places):
    def train(model, input, right):
        for _ in range(3):
            torch.testing.assert_close(found(model, input), right)

    places = [[devices[k] for k in place] for place in places]
    modules, inputs = [layers() for _ in places], [batch(place[0]) for place in places]
    right = [found(copy.deepcopy(module), batch()) for module in modules]
    models = [wrap(module, place, mode) for module, place in zip(modules, places)]
    run_in_threads([partial(train, *case) for case in zip(models, inputs, right)])
