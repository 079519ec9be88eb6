"""Mixed precision: gradients are those of the plain model on the micro-batches, bit for bit."""

import copy

import pytest
import torch
from torch import nn

from examples import mixed_precision
from examples.mixed_precision import Cast
from tests.support.helpers import CPUS, Plain
from tests.support.loops import BF16, FP16, mean_square
from torchgpipe import GPipe

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Reduce the example, and hide accelerators, on which bits may differ."""
    monkeypatch.setattr(mixed_precision, "BATCH", 128)
    monkeypatch.setattr(mixed_precision, "places", lambda n: [torch.device("cpu")] * n)


def test_example(capsys, monkeypatch):
    rounding = mixed_precision.rounding
    few = {
        # A problem that few steps solve.
        "BATCH": 64,
        "FEATURES": 8,
        "CLASSES": 2,
        "rounding": lambda m, cache: rounding(min(m, 16), cache),
    }
    for name, value in few.items():
        monkeypatch.setattr(mixed_precision, name, value)
    assert mixed_precision.main(["--steps", "12", "--chunks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["0.0e+00"] * 4


def layers():
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.LayerNorm(8),
        nn.GELU(),
        nn.Linear(8, 8),
        nn.ReLU(inplace=True),
        nn.BatchNorm1d(8),
        nn.Linear(8, 8),
        nn.Linear(8, 4),
    )


def pair(mode, module=None, balance=(3, 2, 3)):
    """A wrapped model and the plain one."""
    module = module or layers()
    plain = Plain(copy.deepcopy(module), 4)
    return GPipe(module, balance, devices=CPUS[:3], chunks=4, checkpoint=mode), plain


def verify(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def gradients(model):
    return [p.grad for p in model.parameters()]


def mixed(before, after):
    """A model whose second partition of three is in bfloat16."""
    return nn.Sequential(
        nn.Linear(8, 8), before, nn.Linear(8, 8, dtype=BF16), after, nn.Linear(8, 8)
    )


def test_partition_in_bfloat16(mode):
    models, x = pair(mode, mixed(Cast(BF16), Cast(torch.float32)), (2, 2, 1)), torch.rand(8, 8)
    for model in models:
        mean_square(model(x)).backward()
    verify(*map(gradients, models))
    assert [p.grad.dtype for p in models[0].parameters()][::2] == [torch.float32, BF16, torch.float]


@DTYPES
def test_deferred_batch_norm_under_autocast(mode, dtype):
    """A deferred norm has the statistics of the mini-batch, in single precision."""
    norm = nn.BatchNorm2d(4)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 2, 3))
    options = {"chunks": 4, "checkpoint": mode, "deferred_batch_norm": True}
    model = GPipe(copy.deepcopy(plain), [2, 2], devices=CPUS[:2], **options)
    x = torch.rand(8, 3, 8, 8)
    with torch.autocast("cpu", dtype):
        loss = mean_square(model(x))
        plain(x)
    loss.backward()
    torch.testing.assert_close([*model[1].buffers()], [*norm.buffers()])


def test_rounding():
    """Autograd adds gradients of micro-batches in bfloat16 if autocast caches weights."""
    cached, own = ([mixed_precision.rounding(m, cache) for m in (1, 32)] for cache in (True, False))
    assert cached[0] == own[0]
    assert cached[1] > 2 * cached[0]
    assert own[1] < 1.5 * own[0]
