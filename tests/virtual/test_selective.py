"""Cells whose recomputations compute again what a policy of PyTorch's does not keep."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import Apply, assert_no_races, linears, wrap
from tests.support.offload import Attention
from tests.support.size import some
from torchgpipe import MappedGPipe, ScheduledLoss
from torchgpipe.testing import observe

M = 5
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}
aten = torch.ops.aten
calls = []


@torch.library.custom_op("torchgpipe_selective::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.device)
    return x * 2


double.register_autograd(lambda _, grad: grad * 2)


def of_gpipe(devices, mode):
    return wrap([Attention() for _ in devices], devices, mode, M)


def of_schedule(devices, mode, name="fill_drain"):
    return ScheduledLoss(of_gpipe(devices, mode), lambda y: y.pow(2).mean(), name)


def of_map(devices, mode):
    layers = nn.Sequential(*[Attention() for _ in devices])
    return MappedGPipe(
        layers, {str(k): x for k, x in enumerate(devices)}, chunks=M, checkpoint=mode
    )


def trained(make, devices, mode, *, jitter=None, steps=1, **options):
    """The gradients of the last of some steps, its peak, and what was observed in it."""
    torch.manual_seed(0)
    model = make(devices, mode)
    for k in range(steps):
        torch.manual_seed(k)
        model.zero_grad()
        x = torch.rand(2 * M, 16, 32, device=devices[0])
        gc.collect()
        before = torch.accelerator.memory_allocated(devices[1])
        torch.accelerator.reset_peak_memory_stats(devices[1])
        with observe(costs=COSTS, jitter=jitter, **options) as seen:
            y = model(x)
            (y if isinstance(model, ScheduledLoss) else y.pow(2).mean()).backward()
    assert_no_races(seen)
    peak = torch.accelerator.max_memory_allocated(devices[1]) - before
    return [x.grad.cpu() for x in model.parameters()], peak, seen


def dear(context, op, *args, **kwargs):
    """Keep products of matrices."""
    kept = op in (aten.addmm.default, aten.mm.default, aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def selective(policy):
    return partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("make", [of_gpipe, of_schedule, of_map])
def test_what_a_policy_keeps_is_not_computed_again(devices, make):
    devices = devices[:2]
    expected, most, never = trained(make, devices, "never")
    _, least, always = trained(make, devices, "always")
    nothing = selective(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)
    for mode, time in ((selective(dear), never), (nothing, always)):
        found, peak, seen = trained(make, devices, mode)
        assert all(map(torch.equal, found, expected))
        assert seen.makespan == time.makespan
        if mode is not nothing:
            assert least < peak < most


@pytest.mark.parametrize("name", some(["1f1b", "zbh1", "zbv"], ["zbv"]))
def test_schedules(devices, name):
    """Partitions beside it may send to the host what they save."""
    places = [devices[k] for k in ((0, 1, 1, 0) if name == "zbv" else (0, 1, 2, 3))]
    make = partial(of_schedule, name=name)
    expected, *_ = trained(make, places, "never")
    saved = selective(dear)
    for mode in (saved, [saved, "always", "offload", saved]):
        found, *_ = trained(make, places, mode, jitter=0)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("retained", [False, True])
def test_a_second_backward(devices, retained):
    grads = []
    for mode in ("never", selective(dear)):
        torch.manual_seed(0)
        model = of_gpipe(devices[:2], mode)
        x = torch.rand(2 * M, 16, 32, device=devices[0], requires_grad=True)
        with observe(jitter=0) as seen:
            y = model(x).pow(2).mean()
            if retained:
                y.backward(retain_graph=True)
                y.backward()
            else:
                (grad,) = torch.autograd.grad(y, x, create_graph=True)
                grad.pow(2).sum().backward()
        assert_no_races(seen)
        grads.append([x.grad.cpu(), *[p.grad.cpu() for p in model.parameters()]])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize(
    ("choice", "count"), [("MUST_SAVE", 2), ("MUST_RECOMPUTE", 4), ("MUST_CPU_OFFLOAD", 4)]
)
def test_what_choices_mean(choice, count):
    """PyTorch computes again what a policy sends to the CPU, but in compiled code."""
    layers = [nn.Linear(4, 4), Apply(lambda x: double(x).sin())]
    operator = torch.ops.torchgpipe_selective.double.default

    def choose(context, op, *args, **kwargs):
        return CheckpointPolicy[choice if op is operator else "PREFER_RECOMPUTE"]

    model = wrap(layers, "cpu", selective(choose), 2, [2])
    calls.clear()
    model(torch.rand(4, 4)).sum().backward()
    assert len(calls) == count


def test_what_has_changed_is_an_error(devices):
    """PyTorch looks for changes of what it keeps, and not of what it computes again."""

    class Spoiling(nn.Linear):
        def forward(self, x):
            # PyTorch 2.15 sees no change of a product of three dimensions.
            y = super().forward(x.flatten(0, 1))
            z = y * 2
            y.add_(1)
            return z.sin().view(x.shape)

    def spoilt(devices, mode):
        return wrap([nn.Linear(32, 32), Spoiling(32, 32), *linears(32, 32, 32)], devices, mode, M)

    with pytest.raises(RuntimeError, match=r"must not be changed .* mutated\); use the layer"):
        trained(spoilt, devices[:2], selective(dear))


class Moving(nn.Module):
    """A layer with a buffer that it changes, and copies."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        return x * self.mean.clone()


def changing(devices, mode):
    layers = [nn.Linear(32, 32), Moving(), nn.BatchNorm1d(16), nn.Tanh()]
    return wrap(layers, devices[:2], mode, M)


def test_a_policy_is_asked_for_the_layers_alone(devices):
    asked = []

    def noting(context, op, *args, **kwargs):
        asked.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    model = changing(devices, selective(noting))
    model(torch.rand(2 * M, 16, 32, device=devices[0]))
    # The layer's own, and not those for recomputations.
    assert asked.count(aten.clone.default) == M
    assert aten.cat.default not in asked


def test_layers_that_change_buffers_under_a_policy(devices):
    """Buffers are copied around one of the two runs, and PyTorch numbers operators in both."""
    expected, *_ = trained(changing, devices, "never")
    for kept in (aten.addmm.default, aten.clone.default):
        found, *_ = trained(changing, devices, selective([kept]))
        assert all(map(torch.equal, found, expected))


def test_a_policy_is_described(devices):
    model = of_gpipe(devices[:4], [selective(dear), "never", "offload", "always"])
    rows = [row.checkpoint for row in model.describe().rows]
    assert rows == ["selective", "never", "offload", "always"]
    assert {row.checkpoint for row in of_map(devices[:2], selective(dear)).describe().rows} == {
        "selective"
    }


def test_stages_that_are_graphs_take_no_policy(devices):
    step = of_schedule(devices[:2], selective(dear))
    step.stages = "graph"
    with pytest.raises(ValueError, match=r"a stage that is a graph keeps all .*'selective'"):
        step(torch.rand(2 * M, 16, 32, device=devices[0]))
