"""State dicts, and checkpoints that go from some processes to others."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F

from torchgpipe import GPipe
from torchgpipe.distributed import Pipe

#: Processes have different parameters, so each parameter has its settings under its own name.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

BALANCES = {("1f1b", 4): [2] * 4, ("zbv", 4): [1] * 8, ("1f1b", 2): [3, 5], ("zbv", 2): [2] * 4}


def layers(seed, device="cpu"):
    torch.manual_seed(seed)
    with torch.device(device):
        made = [
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)) for _ in range(7)
        ]
        return nn.Sequential(*made, nn.Linear(6, 6))


def trained(model, step):
    """Train a model for two steps; return its optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for k in range(2):
        torch.manual_seed(k)
        optimizer.zero_grad()
        step(*torch.rand(2, 8, 6))
        optimizer.step()
    return optimizer


def parts(model, optimizer):
    state, state_of_optimizer = get_state_dict(model, optimizer, options=FLAT)
    return {"model": state, "optimizer": state_of_optimizer}


def pipe_of(module, group, name, size):
    return Pipe(module, BALANCES[name, size], loss=F.mse_loss, schedule=name, chunks=2, group=group)


def save(group, folder, name, size):
    pipe = pipe_of(layers(0), group, name, size)
    optimizer = trained(pipe, pipe.step)
    dcp.save(parts(pipe, optimizer), checkpoint_id=folder, process_group=group)


def restored(model, folder, step, **options):
    """Load a checkpoint, and train one step; return the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = parts(model, optimizer)
    dcp.load(state, checkpoint_id=folder, **options)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=FLAT,
    )
    optimizer.zero_grad()
    torch.manual_seed(9)
    step(*torch.rand(2, 8, 6))
    optimizer.step()
    return model.state_dict()


def load(group, folder, name, size, device):
    pipe = pipe_of(layers(1, device), group, name, size)
    found = restored(pipe, folder, pipe.step, process_group=group)
    return {key: x.clone() for key, x in found.items()}


# PyTorch warns that this process is alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("name", "size", "device"), [("zbv", 4, "cpu"), ("1f1b", 2, "meta"), ("zbv", 2, "meta")]
)
def test_checkpoint_of_other_processes(name, size, device, processes, tmp_path):
    processes.run(save, 4, str(tmp_path), "1f1b", 4)
    found = processes.run(load, size, str(tmp_path), name, size, device)
    one = GPipe(layers(2), [4, 4], devices=["cpu", "cpu"], chunks=2)

    def step(x, y):
        F.mse_loss(one(x), y).backward()

    # One process knows the keys of the plain module through the module itself.
    expected = restored(one.module, tmp_path, step, no_dist=True)
    assert sorted(expected) == sorted(key for own in found for key in own)
    for own in found:
        for key, x in own.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-4, atol=1e-6)


def load_plain(group):
    """Check that the state dict of a GPipe loads, as that of the plain model, in any placement."""
    plain = layers(3)
    for source in (plain, GPipe(copy.deepcopy(plain), [3, 5], devices=["cpu", "cpu"])):
        pipe = pipe_of(layers(4, "meta"), group, "zbv", 2)
        pipe.load_state_dict(source.state_dict())
        for key, x in pipe.state_dict().items():
            assert torch.equal(x, plain.state_dict()[key])


def test_plain_state_dicts(processes):
    processes.run(load_plain, 2)
