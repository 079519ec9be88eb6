"""Optimizers, schedules, clipping and averages work as around the plain model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import SGD, AdamW, lr_scheduler, swa_utils

from examples import training_loop
from tests.support.helpers import CPUS, MODES, Plain
from tests.support.loops import cross_entropy, within_backward
from torchgpipe import GPipe


def test_example(capsys):
    assert training_loop.main(["--steps", "60"]) == 0
    assert "with everything" in capsys.readouterr().out


def test_example_that_did_not_train(capsys):
    assert training_loop.main(["--steps", "4"]) == 1
    assert "Not as it should be" in capsys.readouterr().out


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


def norm_of(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters()])


def train(model, optimizer, schedule=None, clip=None, accumulate=1, steps=4):
    """Losses of mini-batches, and norms of gradients that are clipped."""
    for k, batch in enumerate(batches(steps)):
        loss = cross_entropy(model, batch)
        (loss / accumulate).backward()
        yield loss.detach()
        if (k + 1) % accumulate:
            continue
        if clip is not None:
            yield norm_of(model)
            clip(model)
            yield norm_of(model)
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(loss.detach())
        elif schedule is not None:
            schedule.step()


def by(optimizer, **options):
    """A loop that trains by an optimizer."""
    return lambda model: train(model, optimizer(model.parameters(), 0.05, **options))


def scheduled(make):
    def loop(model):
        optimizer = SGD(model.parameters(), 0.5)
        return train(model, optimizer, make(optimizer), steps=6)

    return loop


def clipped(**options):
    def clip(model):
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
        assert torch.isfinite(total)

    return lambda model: train(model, SGD(model.parameters(), 0.1), clip=clip)


def clipped_by_value(model):
    def clip(model):
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    return train(model, SGD(model.parameters(), 0.1), clip=clip)


def accumulated(model):
    return train(model, SGD(model.parameters(), 0.1), accumulate=3, steps=6)


def muon(model):
    return train(model, torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], 0.01))


def by_group(model):
    """Train with decay of weights and not of biases, by the plain model's names."""
    module = getattr(model, "module", model)
    named = dict(module.named_parameters())
    assert list(named)[:3] == ["0.weight", "0.bias", "1.weight"]
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("weight")], "lr": 0.01},
        {"params": [p for name, p in named.items() if name.endswith("bias")], "weight_decay": 0},
    ]
    return train(model, AdamW(groups, weight_decay=0.5))


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
            away = [p.grad * (0.05 / norm_of(model)) for p in parameters]
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


def pruned(model):
    """Prune a layer between steps, and for good after some more."""
    yield from by(SGD)(model)
    prune.l1_unstructured(model[3], "weight", 0.5)
    yield from by(SGD)(model)
    prune.remove(model[3], "weight")
    assert (model[3].weight == 0).sum() == 32
    yield from by(SGD)(model)


def parametrised(model):
    parametrizations.weight_norm(model[0])
    parametrizations.orthogonal(model[3])
    return by(AdamW)(model)


def averaged(model):
    """Train with an average of the weights, which copies the model."""
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = AdamW(model.parameters(), 0.05)
    for loss in train(model, optimizer):
        average.update_parameters(model)
        yield loss
    swa_utils.update_bn(batches(), average)
    average.eval()
    yield average(batches()[0][0]).detach()
    yield model(batches()[0][0]).detach()


LOOPS = {
    "AdamW": by(AdamW),
    "AdamW foreach": by(AdamW, foreach=True),
    "AdamW fused": by(AdamW, fused=True),
    "OneCycleLR": scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.5, 10)),
    "LambdaLR": scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1))),
    "ReduceLROnPlateau": scheduled(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "SWALR": scheduled(lambda o: swa_utils.SWALR(o, 0.05, 2)),
    "clipped": clipped(error_if_nonfinite=True),
    "clipped foreach": clipped(foreach=True),
    "clipped for each": clipped(foreach=False, norm_type=float("inf")),
    "clipped by value": clipped_by_value,
    "accumulated": accumulated,
    "by group": by_group,
    "LBFGS": lbfgs,
    "SAM": sam,
    "pruned": pruned,
    "parametrised": parametrised,
    "averaged": averaged,
}
if hasattr(torch.optim, "Muon"):
    LOOPS["Muon"] = muon


def verify(mode, loop, models=None):
    found, expected = ([*loop(model)] for model in models or pair(mode))
    assert len(found) > 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", LOOPS)
def test_losses_are_those_of_the_plain_model(name, mode):
    verify(mode, LOOPS[name])


@pytest.mark.parametrize("mode", MODES)
def test_norm_that_is_not_finite(mode):
    for model in pair(mode):
        (x, y), *_ = batches()
        x[7, 0] = torch.inf
        cross_entropy(model, (x, y)).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# ---------------------------------------------------------------- averages of the weights


def test_average_has_the_keys_of_the_model():
    model, other = pair("always")[0], GPipe(layers(), [1, 5], devices=CPUS[:2])
    state = swa_utils.AveragedModel(model).state_dict()
    assert "module.partitions.1.3.weight" in state
    average = swa_utils.AveragedModel(other)
    average.load_state_dict(state)
    torch.testing.assert_close(average.module[3].weight, model[3].weight)
    assert [*swa_utils.AveragedModel(model.module).state_dict()][1] == "module.0.weight"


def test_average_on_another_device():
    """Copies of the wrapper cannot move; copies of the plain model can."""
    model = pair("always")[0]
    with pytest.raises(TypeError, match="must stay on their devices"):
        swa_utils.AveragedModel(model, device="cpu")
    average = swa_utils.AveragedModel(model.module, device="cpu")
    average.update_parameters(model.module)
    average.eval(), model.eval()
    torch.testing.assert_close(average(batches()[0][0]), model(batches()[0][0]))


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


@pytest.mark.parametrize("mode", MODES)
def test_steps_within_backward_with_tied_parameters(mode):
    models = pair(mode, tied(), devices=["cpu"] * 3)
    verify(mode, lambda model: within_backward(model, batches(4)), models)


@pytest.mark.parametrize("mode", MODES)
# torch.distributed.optim compiles some functions when it is imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_optimizer_in_backward_of_torch(mode):
    from torch.distributed.optim import _apply_optimizer_in_backward

    def loop(model):
        _apply_optimizer_in_backward(AdamW, model.parameters(), {"lr": 0.05})
        for batch in batches(4):
            loss = cross_entropy(model, batch)
            loss.backward()
            yield loss.detach()

    verify(mode, loop)


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
