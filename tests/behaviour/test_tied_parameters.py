"""Tied parameters, and modules used several times, train as without a wrapper."""

import copy
import pickle
import re

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.support.helpers import CPUS, plain, wrap
from torchgpipe import GPipe
from torchgpipe.partition.placement import tensors, verify_sharing
from torchgpipe.partition.split import split_module

WORDS, WIDTH = 7, 4


class Decoder(nn.Module):
    """A layer that computes with the weight of an embedding, maybe of another partition."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class Buffered(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x):
        with torch.no_grad():
            self.table.add_(1)
        return x * 1


def language_model():
    """A model whose first and last layers share a weight, as do two inner ones with own biases."""
    torch.manual_seed(0)
    embedding = nn.Embedding(WORDS, WIDTH)
    one, two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    two.weight = one.weight
    return nn.Sequential(embedding, one, nn.Tanh(), two, Decoder(embedding)).double()


def reused():
    """A block that comes three times, as in a universal transformer, and its activation."""
    torch.manual_seed(0)
    block, act = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), nn.GELU()
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), block, act, block, act, nn.Linear(WIDTH, 2), nn.Tanh()
    ).double()


def with_a_norm():
    """A batch norm that comes twice."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), norm, nn.Tanh(), norm, nn.Linear(WIDTH, 3)
    ).double()


MODELS = [language_model, reused, with_a_norm]


@pytest.fixture
def input(device):
    return torch.randint(WORDS, (8,), device=device)


def divided(module, device, cuts=None, mode="except_last", **options):
    """Wrap a model in one partition, in two, or in as many as it has layers."""
    n = len(module)
    balance = {None: [n], "two": [2, n - 2], "each": [1] * n}[cuts]
    return wrap(module, device, mode, balance=balance, **options)


def train(model, forward, input):
    """Take three steps with an optimizer that has state; return all that the steps compute."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        output = forward(input)
        output.square().sum().backward()
        found += [output.detach(), *[p.grad for p in model.parameters()]]
        optimizer.step()
    return [*found, *model.parameters()]


def ties(model):
    """Names of parameters and buffers, in groups that share one tensor."""
    model = getattr(model, "module", model)
    names = {}
    for name, tensor in tensors(model):
        names.setdefault(id(tensor), []).append(name)
    return sorted(names.values())


# On one device.


def test_functional_call_replaces_all_uses(mode, device, input):
    model = divided(language_model(), device, cuts="two", mode=mode)
    reference = model.module
    torch.manual_seed(1)
    found = []
    replaced = torch.rand(WORDS, WIDTH, dtype=torch.double, device=device)
    for owner, name, call in (
        (
            reference,
            "0.weight",
            lambda p: plain(lambda x: functional_call(reference, p, x), input, 3),
        ),
        (model, "partitions.0.0.weight", lambda p: functional_call(model, p, input)),
    ):
        leaf = replaced.clone().requires_grad_()
        output = call({name: leaf})
        output.square().sum().backward()
        assert owner.get_parameter(name).grad is None
        found.append([output.detach(), leaf.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("cuts", [None, "each"])
def test_shared_buffer(cuts, mode, device):
    table = torch.zeros(1)
    module = nn.Sequential(Buffered(table), nn.Linear(2, 2), Buffered(table)).to(device)
    model = divided(module, device, cuts=cuts and "each", mode=mode, chunks=2)
    assert model[0].table is model[2].table
    with torch.no_grad():
        model(torch.rand(4, 2, device=device))
    assert model[2].table.item() == 4


# Across devices.


def on_devices(module, balance, devices):
    verify_sharing(split_module(module, balance), [CPUS[k] for k in devices])


def proposals(message):
    """The balance and the devices that an error proposes."""
    balance, devices = re.search(r"balance=(\[.*?\]).*?devices=(\[.*?\])", message).groups()
    devices = [int(name.removeprefix("cpu:")) for name in re.findall(r"cpu:\d", devices)]
    return [int(size) for size in re.findall(r"\d+", balance)], devices


def buffers():
    table = torch.ones(3)
    return nn.Sequential(nn.ReLU(), Buffered(table), nn.ReLU(), Buffered(table), nn.ReLU())


def test_a_buffer_on_two_devices_is_an_error_that_proposes():
    module, balance, devices = buffers(), [1, 1, 1, 2], [0, 1, 2, 3]
    with pytest.raises(ValueError, match="buffer can be shared only by layers on one") as caught:
        on_devices(module, balance, devices)
    assert re.search("1.table: cpu:1, 3.table", str(caught.value))
    proposed = proposals(str(caught.value))
    assert proposed == ([1, 4], [0, 1, 2, 1])
    # The proposed balance and devices are right.
    on_devices(module, proposed[0], devices[: len(proposed[0])])
    on_devices(module, balance, proposed[1])


def test_wrapper_is_not_made_and_nothing_moved():
    proposed = r"balance=\[1, 4\].*devices=\['cpu', 'cpu', 'meta', 'cpu'\]"
    with pytest.raises(ValueError, match=proposed):
        GPipe(buffers(), [1, 1, 1, 2], devices=["cpu", "cpu", "meta", "meta"])


def test_a_parameter_on_two_devices_is_at_home_on_the_first_one():
    module = language_model()
    model = GPipe(module, [2, 1, 2], devices=["meta", "cpu", "cpu"])
    assert module[4].weight is module[0].weight
    assert module[4].weight.is_meta
    assert len([*model.parameters()]) == len([*module.parameters()])


# Saved, loaded and copied.


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("make", MODELS)
def test_copies_are_tied(make, duplicate, device, input):
    model = divided(make(), device, cuts="each")
    twin = duplicate(model)
    assert ties(twin) == ties(make())
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in model.parameters()}
    for a, b in zip(train(model, model, input), train(twin, twin, input), strict=True):
        assert torch.equal(a, b)
