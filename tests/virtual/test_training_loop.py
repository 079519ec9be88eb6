"""Optimizers, clipping and averages around a step, with parameters on several devices."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.helpers import Plain, assert_no_races
from tests.support.loops import cross_entropy
from torchgpipe import GPipe
from torchgpipe.testing import observe

CPU = torch.device("cpu")


def layers():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
    ).double()


def verify(loop, mode, places, module=None):
    """Compare the values that a loop yields for a wrapped model and for the plain one."""
    module = module or layers()
    plain = Plain(copy.deepcopy(module), 4)
    model = GPipe(module, [2, 2, 2], devices=places, chunks=4, checkpoint=mode)
    expected = [*loop(plain, CPU, CPU)]
    with observe(jitter=1) as seen:
        found = [*loop(model, places[0], places[-1])]
    assert_no_races(seen)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def batches(first, last):
    torch.manual_seed(1)
    for _ in range(3):
        yield torch.randn(8, 8).double().to(first), torch.randint(8, (8,)).to(last)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", ""])
def test_usual_loop(foreach, devices):
    """The loop clips gradients, and averages weights on their devices and on the CPU."""

    def loop(model, first, last):
        plain = getattr(model, "module", model)
        options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
        averages = [AveragedModel(model, **options), AveragedModel(plain, CPU, **options)]
        optimizer = torch.optim.AdamW(model.parameters(), 0.01, foreach=foreach)
        for batch in batches(first, last):
            loss = cross_entropy(model, batch)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=foreach)
            yield from (loss.item(), norm.item())
            nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=foreach)
            clipped = nn.utils.clip_grad_norm_(
                model.parameters(), 0.1, error_if_nonfinite=True, foreach=foreach
            )
            yield clipped.item()
            optimizer.step()
            optimizer.zero_grad()
            for average, source in zip(averages, (model, plain)):
                average.update_parameters(source)
        for average, device in zip(averages, (first, CPU)):
            yield average.eval()(batch[0].to(device)).tolist()

    verify(loop, "except_last", devices[:3])


@pytest.mark.parametrize(("chunks", "saves"), [(1, True), (2, False), (8, False)])
def test_memory_of_steps_within_backward(chunks, saves, devices):
    """Autograd adds up a parameter's gradients of all micro-batches before it hands them over."""
    module = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
    model = GPipe(module, [8, 8], devices=devices[:2], chunks=chunks)
    weights = 8 * 64 * 64 * 4
    x = torch.rand(8, 64, device=devices[0])

    def peak():
        before = torch.accelerator.memory_allocated(devices[0])
        torch.accelerator.reset_peak_memory_stats(devices[0])
        model(x).sum().backward()
        model.zero_grad()
        return (torch.accelerator.max_memory_allocated(devices[0]) - before) / weights

    peak()
    usual = peak()

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-3)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    assert usual > 0.95
    assert (peak() < usual / 2) == saves
