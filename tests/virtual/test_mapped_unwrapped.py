"""Models without their wrapper: given back, copied, or moved, on several devices or on one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel

from tests.support.helpers import assert_no_races
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe


class Model(nn.Module):
    """A model with a tied head, an activation of its own, and a parametrised layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), weight_norm(nn.Linear(4, 4))])
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(12).view(4, 3)


def trained(devices):
    """A wrapper that has trained, and what its model returns."""
    torch.manual_seed(0)
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]
    model = Model()
    plain = copy.deepcopy(model)
    places = [devices[k % len(devices)] for k in range(len(names))]
    pipe = MappedGPipe(model, dict(zip(names, places)), chunks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
    pipe(IDS.to(devices[0])).square().mean().backward()
    optimizer.step()
    plain.load_state_dict(pipe.state_dict())
    return pipe, plain(IDS).detach()


def alone(model, device):
    model.to(device)
    assert {x.device for x in model.parameters()} == {torch.device(device)}
    return model(IDS.to(device))


def saved(model, device):
    with io.BytesIO() as file:
        torch.save(model.state_dict(), file)
        file.seek(0)
        other = Model()
        other.load_state_dict(torch.load(file, map_location="cpu"))
    return other(IDS)


USES = {
    "calls": lambda model, device: model(IDS.to(device)),
    "copies": lambda model, device: copy.deepcopy(copy.deepcopy(model))(IDS.to(device)),
    "averages": lambda model, device: AveragedModel(model)(IDS.to(device)),
    "moves": lambda model, device: alone(model, device),
    "moved copies": lambda model, device: alone(copy.deepcopy(model), "cpu"),
    "saves": saved,
    "wraps": lambda model, device: MappedGPipe(model, {"": "cpu"}, chunks=2)(IDS),
}
WAYS = {
    "module": lambda pipe, _: pipe.module,
    "unwrap": lambda pipe, _: pipe.unwrap(),
    "one device": lambda pipe, device: pipe.unwrap(device),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_model_does_without_its_wrapper(way, use, devices):
    pipe, expected = trained(devices[:3])
    with observe() as seen:
        model = WAYS[way](pipe, devices[1])
        found = USES[use](model, devices[1])
    assert_no_races(seen)
    torch.testing.assert_close(found.detach().cpu(), expected)
    assert model.head.weight is model.embed.weight


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_copy_trains_by_itself(devices):
    pipe, expected = trained(devices[:2])
    own = copy.deepcopy(pipe.module)
    assert own.head.weight is own.embed.weight
    own(IDS.to(devices[0])).square().mean().backward()
    assert {x.grad.device for x in own.parameters()} == {*devices[:2]}
    with torch.no_grad():
        own.embed.weight.zero_()
    torch.testing.assert_close(pipe(IDS.to(devices[0])).detach().cpu(), expected)


@pytest.mark.parametrize("place", [None, "cpu"])
def test_a_wrapper_that_has_given_its_model_back(place, devices):
    pipe, _ = trained(devices[:2])
    model = pipe.unwrap(place)
    assert type(model) is Model
    with pytest.raises(RuntimeError, match=r"after unwrap\(\).*model: Model\).*wrap it anew"):
        pipe(IDS)
    if place:
        assert {x._compiled_call_impl for x in model.modules()} == {None}
        assert not any("torchgpipe" in name for x in model.modules() for name in vars(x))


def test_pickles_of_a_model(devices):
    """A pickle knows nothing of devices."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(model)(torch.ones(2, 4))
    pipe = MappedGPipe(model, {"0": devices[0], "1": devices[1]})
    again = pickle.loads(pickle.dumps(pipe.module)).to("cpu")
    assert b"torchgpipe.mapped" not in pickle.dumps(again)
    torch.testing.assert_close(again(torch.ones(2, 4)), expected)
