"""Loops with more than one forward for a step, averages, and steps within backward."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, swa_utils

from examples import training_loop
from tests.support.helpers import CPUS, Plain
from tests.support.loops import cross_entropy, within_backward
from torchgpipe import GPipe


def test_example(capsys, monkeypatch):
    # A problem that few steps solve.
    monkeypatch.setattr(training_loop, "FEATURES", 4)
    monkeypatch.setattr(training_loop, "CLASSES", 2)
    assert training_loop.main(["--steps", "20", "--chunks", "2"]) == 0
    assert "with everything" in capsys.readouterr().out


def layers():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
    ).double()


def pair(mode, module=None, devices=CPUS[:3], **options):
    """A wrapped model, and the plain one on the micro-batches one after another."""
    module = module or layers()
    plain = Plain(copy.deepcopy(module), 4)
    return GPipe(module, [2, 2, 2], devices=devices, chunks=4, checkpoint=mode, **options), plain


def batches(count=3):
    torch.manual_seed(1)
    return [(torch.randn(8, 8).double(), torch.randint(4, (8,))) for _ in range(count)]


def lbfgs(model):
    """Train by L-BFGS, which calls the model as often as it likes."""
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=3)
    losses = []
    for batch in batches():

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
    return losses


def sam(model):
    """Train by SAM, which changes weights in place between two forwards and backwards of a step."""
    parameters, losses = list(model.parameters()), []
    optimizer = SGD(parameters, 0.1)
    for batch in batches():
        cross_entropy(model, batch).backward()
        with torch.no_grad():
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            away = [p.grad * (0.05 / norm) for p in parameters]
            torch._foreach_add_(parameters, away)
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, away)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def verify(mode, loop, models=None):
    found, expected = ([*loop(model)] for model in models or pair(mode))
    assert len(found) > 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("loop", [lbfgs, sam])
def test_losses_are_those_of_the_plain_model(loop, mode):
    verify(mode, loop)


# ---------------------------------------------------------------- averages of the weights


def test_average_has_the_keys_of_the_model():
    model, other = pair("always")[0], GPipe(layers(), [1, 5], devices=CPUS[:2])
    state = swa_utils.AveragedModel(model).state_dict()
    assert "module.partitions.1.3.weight" in state
    average = swa_utils.AveragedModel(other)
    average.load_state_dict(state)
    torch.testing.assert_close(average.module[3].weight, model[3].weight)
    assert [*swa_utils.AveragedModel(model.module).state_dict()][1] == "module.0.weight"


def test_update_bn_with_deferred_ones_sees_whole_mini_batches():
    plain = layers()
    model = pair("always", copy.deepcopy(plain), deferred_batch_norm=True)[0]
    for each in (model, plain):
        swa_utils.update_bn(batches(), each)
    torch.testing.assert_close([*model.buffers()], [*plain.buffers()])


# ---------------------------------------------------------------- steps within backward


def tied():
    module = layers()
    module[3] = module[0]
    return module


def test_steps_within_backward_with_tied_parameters(mode):
    models = pair(mode, tied(), devices=["cpu"] * 3)
    verify(mode, lambda model: within_backward(model, batches(4)), models)


class Sometimes(nn.Linear):
    """A layer that uses its weight for micro-batches of positive numbers only."""

    def forward(self, x):
        return super().forward(x) if x.min() > 0 else x.exp()


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_step_of_a_parameter_that_the_last_micro_batch_uses(mode):
    """Other micro-batches would be recomputed with the changed parameter, so it is an error."""
    module = nn.Sequential(nn.Tanh(), nn.Tanh(), Sometimes(4, 4), nn.Tanh())
    model = GPipe(module, [2, 2], devices=CPUS[:2], chunks=4, checkpoint=mode)
    weight = model[2].weight
    weight.register_post_accumulate_grad_hook(lambda p: SGD([p], 0.1).step())
    x = torch.tensor([-1.0, -1, -1, 1]).repeat_interleave(2)[:, None].expand(8, 4)
    with pytest.raises(RuntimeError, match="parameters must not be changed in place"):
        model(x.clone().requires_grad_()).sum().backward()
