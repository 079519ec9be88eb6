"""torch.distributed.checkpoint, without a process group: tensors are found by their names."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from torchgpipe import GPipe

# PyTorch warns each time that there is no process group, which these tests do not need.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SOURCES = [None, [2, 2]]
TARGETS = [None, [4], [1, 1, 2]]


class Parent(nn.Module):
    """A wrapper, or the plain model, among other layers."""

    def __init__(self, balance, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 3)]
        layers[3].weight = layers[0].weight
        body = nn.Sequential(*layers)
        self.stem = nn.Linear(3, 3)
        self.body = GPipe(body, balance, devices=["cpu"] * len(balance)) if balance else body
        self.head = nn.Linear(3, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))

    def plain(self):
        """The same parameters with the names of the plain model."""
        children = dict(self.named_children())
        body = self.body.module if isinstance(self.body, GPipe) else self.body
        return nn.ModuleDict(children | {"body": body})


def trained(balance, seed=0):
    model = Parent(balance, seed)
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.5 + seed}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def same(one, other):
    """Check that parameters are equal, and the optimizers' state for each of them."""
    for (model, optimizer), (it, its_optimizer) in [(one, other)]:
        tensors = zip(model.plain().state_dict().items(), it.plain().state_dict().items())
        equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in tensors)
        for p, q in zip(model.parameters(), it.parameters(), strict=True):
            state, its_state = optimizer.state.get(p, {}), its_optimizer.state.get(q, {})
            equal &= state.keys() == its_state.keys()
            equal &= all(torch.equal(state[key], its_state[key]) for key in state)
        for group, its_group in zip(optimizer.param_groups, its_optimizer.param_groups):
            equal &= all(group[key] == its_group[key] for key in ("lr", "weight_decay"))
    return equal


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_across_balances(source, target, flat, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state(model, optimizer):
        weights, its_state = get_state_dict(model.plain(), optimizer, options=options)
        return {"model": weights, "optimizer": its_state}

    saved = trained(source)
    dcp.save(state(*saved), checkpoint_id=tmp_path)
    model, optimizer = trained(target, seed=1)
    assert not same(saved, (model, optimizer))
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(
        model.plain(),
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    assert same(saved, (model, optimizer))


def test_modules_as_they_are(tmp_path):
    """A checkpoint takes modules themselves, and loads their parameters in place."""
    source, target = Parent([2, 2]), Parent([4], seed=1)
    dcp.save({"body": source.body.module, "head": source.head}, checkpoint_id=tmp_path)
    weight = target.body[0].weight
    dcp.load({"body": target.body.module, "head": target.head}, checkpoint_id=tmp_path)
    assert target.body[0].weight is target.body[3].weight is weight
    assert torch.equal(weight, source.body[0].weight)
    assert torch.equal(target.head.weight, source.head.weight)


@pytest.mark.parametrize("as_state_dict", [False, True])
def test_keys_with_partitions_are_those_of_one_balance(as_state_dict, tmp_path):
    """Keys are missing in another balance, by name; a plain file made of them fits any balance."""
    source = Parent([2, 2])
    dcp.save({"model": source.state_dict()}, checkpoint_id=tmp_path)
    target = Parent([1, 3], seed=1)
    state = {"model": target.state_dict() if as_state_dict else target}
    with pytest.raises(CheckpointException, match=r"Missing key .*model\.body\.partitions\.1\.1\."):
        dcp.load(state, checkpoint_id=tmp_path)

    same_balance = Parent([2, 2], seed=1)
    dcp.load({"model": same_balance}, checkpoint_id=tmp_path)
    assert torch.equal(same_balance.body[3].weight, source.body[3].weight)

    dcp_to_torch_save(tmp_path, tmp_path / "model.pt")
    target.load_state_dict(torch.load(tmp_path / "model.pt")["model"])
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(one, other)


def test_names_of_compiled_layers():
    """Names lack the prefix of the compiler's wrapper, as with the plain model."""
    layers = nn.Sequential(*[torch.compile(nn.Linear(1, 1), backend="eager") for _ in range(2)])
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2)
    assert next(iter(model.module.state_dict())) == "0._orig_mod.weight"
    assert next(iter(get_model_state_dict(model.module))) == "0.weight"
