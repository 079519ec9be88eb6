"""Several wrappers on accelerators: in threads, within each other, and one after another."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.long_runs import run_in_threads
from torchgpipe.testing import observe

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


@pytest.mark.usefixtures("issuer")
@pytest.mark.parametrize(("outer", "inner"), [("never", "always"), ("always", "never")])
@pytest.mark.parametrize("place", [(2, 3), (1, 0), (1, "cpu")], ids=str)
def test_wrapper_within_a_layer(devices, place, outer, inner):
    """The inner wrapper is on other devices, on the same ones, or on the calling layer's."""
    module, within = layers(), layers()
    parameters = [*module.parameters(), *within.parameters()]
    right = found(nn.Sequential(module[:2], within, module[2:]), batch(), parameters)
    place = [torch.device(k) if k == "cpu" else devices[k] for k in place]
    module[2] = nn.Sequential(Elsewhere(wrap(within, place, inner)), nn.Tanh())
    model, input = wrap(module, devices[:2], outer), batch(devices[0])
    with observe(jitter=0) as seen:
        for _ in range(3):
            leaves = [*module.parameters(), *within.parameters()]
            torch.testing.assert_close(found(model, input, leaves), right)
    assert_no_races(seen)


@pytest.mark.usefixtures("issuer")
@pytest.mark.parametrize(("outer", "inner"), [*itertools.pairwise([*MODES, MODES[0]])])
def test_wrapper_as_a_layer_on_the_same_device(devices, outer, inner):
    module, within = layers(), layers()
    right = found(nn.Sequential(module[:2], copy.deepcopy(within), module[2:]), batch())
    within.to(devices[1])
    module[2] = nn.Sequential(wrap(within, [devices[1]] * 2, inner), nn.Tanh())
    model, input = wrap(module, devices[:2], outer), batch(devices[0])
    with observe(jitter=0) as seen:
        torch.testing.assert_close(found(model, input), right)
    assert_no_races(seen)
