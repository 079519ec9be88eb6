"""Mixed precision: gradients are those of the plain model on the micro-batches, bit for bit."""

import copy
import itertools

import pytest
import torch
from torch import nn

from examples import mixed_precision
from examples.mixed_precision import Cast
from tests.support.helpers import CPUS, MODES, Plain
from tests.support.loops import BF16, FP16, backward_of_autocast, mean_square
from torchgpipe import GPipe, verify_recomputation
from torchgpipe.partition.arguments import CHECKPOINT_MODES

DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Reduce the example, and hide accelerators, on which bits may differ."""
    monkeypatch.setattr(mixed_precision, "BATCH", 128)
    monkeypatch.setattr(mixed_precision, "places", lambda n: [torch.device("cpu")] * n)


def test_example(capsys):
    assert mixed_precision.main(["--steps", "25", "--chunks", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["0.0e+00"] * 4


def test_example_that_did_not_train(capsys):
    assert mixed_precision.main(["--steps", "1"]) == 1
    assert "Not as it should be" in capsys.readouterr().out


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


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("where", ["outside", "within", "in the other dtype"])
@pytest.mark.parametrize("mode", MODES)
@DTYPES
def test_autocast(dtype, mode, where, cache):
    """Autocast is around forward alone, around backward too, or another one around backward."""
    models, x = pair(mode), torch.rand(10, 8)
    for model in models:
        backward_of_autocast(model, x, dtype, where, cache)
    verify(*map(gradients, models))
    verify(*[list(model.buffers()) for model in models])
    assert {p.grad.dtype for p in models[0].parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_second_runs_cast_as_the_first(mode):
    model = pair(mode)[0]
    with verify_recomputation(), torch.autocast("cpu", BF16):
        loss = mean_square(model(torch.rand(8, 8)))
    loss.backward()


class Casting(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight, layer):
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        output = x @ weight
        layer.log.append(("forward", x.dtype, output.dtype))
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        into = grad @ weight.t()
        ctx.layer.log.append(("backward", x.dtype, into.dtype))
        return into.to(x.dtype), (x.t() @ grad).to(weight.dtype), None


class Float(torch.autograd.Function):
    """A function that casts its inputs, and turns autocast off."""

    forward = torch.amp.custom_fwd(
        Casting.forward.__wrapped__, device_type="cpu", cast_inputs=torch.float32
    )
    forward = staticmethod(forward)
    backward = staticmethod(Casting.backward)


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.function, self.log = function, []

    def forward(self, x):
        return self.function.apply(x, self.weight, self)


class Own(nn.Linear):
    """A layer with an autocast of its own."""

    def __init__(self, **options):
        super().__init__(8, 8)
        self.options = options

    def forward(self, x):
        with torch.autocast("cpu", **self.options):
            return super().forward(x if self.options.get("enabled", True) else x.float())


@pytest.mark.parametrize("within", [False, True], ids=["outside", "within"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [Casting, Float])
def test_layers_that_set_autocast_themselves(function, mode, within):
    module = nn.Sequential(Calls(function), nn.Tanh(), Own(enabled=False), Own(dtype=FP16))
    models, x = pair(mode, module, (1, 2, 1)), torch.rand(8, 8)
    for model in models:
        with torch.autocast("cpu", BF16):
            loss = mean_square(model(x))
            if within:
                loss.backward()
        if not within:
            loss.backward()
    verify(*map(gradients, models))
    seen, expected = (model[0].log for model in models)
    assert {*seen} == {*expected}, "in the dtypes of the plain model, the second time, too"
    assert seen.count(expected[-1]) == 4, "one backward for each micro-batch"


def trained(model, dtype, bad=(), fused=False):
    """Take some steps with a scaler; return scales, norms and weights."""
    torch.manual_seed(1)
    first, *others = model.parameters()
    optimizers = [
        torch.optim.AdamW([first], 0.01, fused=fused),
        torch.optim.SGD(others, 0.01, fused=fused),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    found = []
    for k in range(6):
        x = torch.randn(8, 8)
        if k in bad:
            x[3] *= 1e6
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = mean_square(model(x))
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        before = [p.detach().clone() for p in model.parameters()]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        stepped = [not torch.equal(a, b) for a, b in zip(before, model.parameters())]
        assert any(stepped) == (k not in bad)
        found.append((torch.tensor(scaler.get_scale()), norm, *before))
    return found


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("mode", MODES)
def test_scaler(mode, fused):
    """One row of one micro-batch overflows: no optimizer steps, and the scale is halved."""
    module = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    found, expected = (trained(m, FP16, {3}, fused) for m in pair(mode, module, (1, 2, 1)))
    verify(found, expected)
    assert [step[0] for step in found] == [1024, 2048, 2048, 1024, 1024, 2048]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["before", "to", "bfloat16", "optimizer before"])
def test_model_in_bfloat16(how, mode):
    module = layers()
    if how == "before":
        module = module.to(BF16)
    models, x, found = pair(mode, module), torch.rand(8, 8, dtype=BF16), []
    for model in models:
        parameters = list(model.parameters())
        if how == "to":
            model.to(BF16)
        elif how != "before":
            model.bfloat16()
        if how != "optimizer before":
            parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, 0.01, fused=True)
        for _ in range(3):
            optimizer.zero_grad()
            loss = mean_square(model(x))
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        assert {p.dtype for p in model.parameters()} == {BF16}
    verify(found[:3], found[3:])
    assert found[2] < found[0]


def mixed(before, after):
    """A model whose second partition of three is in bfloat16."""
    return nn.Sequential(
        nn.Linear(8, 8), before, nn.Linear(8, 8, dtype=BF16), after, nn.Linear(8, 8)
    )


@pytest.mark.parametrize("mode", MODES)
def test_partition_in_bfloat16(mode):
    models, x = pair(mode, mixed(Cast(BF16), Cast(torch.float32)), (2, 2, 1)), torch.rand(8, 8)
    for model in models:
        mean_square(model(x)).backward()
    verify(*map(gradients, models))
    assert [p.grad.dtype for p in models[0].parameters()][::2] == [torch.float32, BF16, torch.float]


@pytest.mark.parametrize("mode", MODES)
def test_partition_in_bfloat16_after_wrapping(mode):
    """Hooks of a partition may do the casts."""
    models = pair(mode, nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), (1, 1, 1))
    x, (model, plain) = torch.rand(8, 8), models
    for part in (model.partitions[1], plain[1]):
        part.to(BF16)
        part.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(BF16),))
        part.register_forward_hook(lambda _, inputs, output: output.float())
    for each in models:
        mean_square(each(x)).backward()
    verify(*map(gradients, models))


def test_border_without_a_cast():
    """A border has no cast of its own, like two layers of the plain model."""
    model, plain = pair("always", mixed(nn.Tanh(), nn.Tanh()), (2, 2, 1))
    for each in (plain, model):
        with pytest.raises(RuntimeError, match="same dtype, but got Float and BFloat16"):
            each(torch.rand(8, 8))
        with torch.autocast("cpu", BF16):
            assert each(torch.rand(8, 8)).dtype is BF16


@DTYPES
@pytest.mark.parametrize("mode", MODES)
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


def test_second_order_under_autocast():
    for mode, within in itertools.product(CHECKPOINT_MODES, [True, False]):
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        models, x = pair(mode, module, (2, 1, 1)), torch.rand(8, 8, requires_grad=True)
        for model in models:
            with torch.autocast("cpu", BF16):
                loss = mean_square(model(x))
            with torch.autocast("cpu", BF16, enabled=within):
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                gradient.square().sum().backward()
        verify(*map(gradients, models))
