"""Results of operators that a policy of PyTorch's sends to the memory of the host."""

import gc
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import Apply, assert_no_races, linears, wrap
from tests.support.offload import Attention
from tests.support.size import some
from tests.virtual.test_offload import unused
from torchgpipe import MappedGPipe, ScheduledLoss
from torchgpipe.devices.streams import current_stream
from torchgpipe.schedule import parse
from torchgpipe.testing import observe

M = 5
COSTS = {"addmm": 1.0, "mm": 1.0, "bmm": 1.0}
aten = torch.ops.aten
calls = []


@torch.library.custom_op("torchgpipe_offloaded::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    calls.append(x.device)
    return x * 2


double.register_autograd(lambda _, grad: grad * 2)

DEAR = (aten.addmm.default, aten.mm.default, aten.bmm.default)


def policy(choice, *more):
    """A policy that chooses one thing for products of matrices, and computes all else again."""

    def choose(context, operator, *args, **kwargs):
        return choice if operator in (*DEAR, *more) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)


SAVED, SENT = policy(CheckpointPolicy.MUST_SAVE), policy(CheckpointPolicy.MUST_CPU_OFFLOAD)


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


@pytest.mark.parametrize("make", [of_gpipe, of_schedule, of_map])
def test_results_leave_and_come_back(devices, make):
    places = devices[:2]
    expected, _, never = trained(make, places, "never")
    _, most, saved = trained(make, places, SAVED)
    found, least, seen = trained(make, places, SENT)
    assert all(map(torch.equal, found, expected))
    # Nothing is computed twice, and copies take no time.
    assert seen.makespan == saved.makespan == never.makespan
    assert least < most * 0.8
    assert seen.transfers[1, "cpu"].bytes == seen.transfers["cpu", 1].bytes > 0
    found, _, _ = trained(make, places, SENT, jitter=0)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", some(["1f1b", "zbh1", "zbv"], ["zbv"]))
def test_schedules(devices, name):
    """A cell comes back before its recomputation, which PyTorch's policy keeps short."""
    places = [devices[k] for k in ((0, 1, 1, 0) if name == "zbv" else (0, 1, 2, 3))]
    make = partial(of_schedule, name=name)
    expected, *_ = trained(make, places, "never")
    _, most, _ = trained(make, places, SAVED)
    for mode in some((SENT, [SENT, SAVED, "offload", SENT]), ([SENT, SAVED, "offload", SENT],)):
        found, peak, seen = trained(make, places, mode, jitter=0)
        assert all(map(torch.equal, found, expected))
        assert seen.transfers[0, "cpu"].bytes > 0
        assert peak <= most or mode is not SENT


def test_copies_are_hidden_behind_computations(devices):
    """A product of a block is copied in as long as that of four products takes."""
    devices = devices[:2]
    _, _, never = trained(of_gpipe, devices, "never")
    _, _, sent = trained(of_gpipe, devices, SENT)
    bytes = sent.transfers[1, "cpu"].bytes / (M - 2)
    for time, hidden in ((6, True), (30, False)):
        links = {link: bytes / time for k in range(2) for link in ((k, "cpu"), ("cpu", k))}
        _, _, seen = trained(of_gpipe, devices, SENT, bandwidth=links)
        assert (seen.makespan == pytest.approx(never.makespan)) == hidden


def test_results_of_all_sorts(devices):
    """Some leave, some stay, some are computed again; views and numbers are results, too."""

    def choose(context, operator, *args, **kwargs):
        kinds = (CheckpointPolicy.MUST_CPU_OFFLOAD, True, CheckpointPolicy.PREFER_RECOMPUTE)
        return kinds[len(operator.name()) % 3]

    mixed = partial(create_selective_checkpoint_contexts, choose)
    expected, *_ = trained(of_gpipe, devices[:2], "never")
    found, _, seen = trained(of_gpipe, devices[:2], mixed, jitter=0)
    assert all(map(torch.equal, found, expected))
    assert seen.transfers[1, "cpu"].bytes > 0


@pytest.mark.parametrize("retained", [False, True])
def test_a_second_backward(devices, retained):
    grads = []
    for mode in ("never", SENT):
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


def test_nothing_is_lost_without_backward(devices):
    model = of_gpipe(devices[:2], SENT)
    x = torch.rand(2 * M, 16, 32, device=devices[0])
    model(x).sum().backward()
    made = unused(model)
    assert min(made) > 0
    model(x)
    gc.collect()
    assert unused(model) == made
    with observe(jitter=0) as seen:
        model(x).sum().backward()
    assert_no_races(seen)
    assert unused(model) == made


def test_what_has_changed_is_an_error(devices):
    """PyTorch looks for changes of what it keeps, and not of what it computes again."""

    class Spoiling(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            z = y * 2
            y.add_(1)
            return z.sin()

    def spoilt(devices, mode):
        return wrap([nn.Linear(32, 32), Spoiling(32, 32), *linears(32, 32, 32)], devices, mode, M)

    for mode in (SAVED, SENT):
        with pytest.raises(RuntimeError, match=r"must not be changed .* mutated\); use the layer"):
            trained(spoilt, devices[:2], mode)


class Beside(nn.Module):
    """A layer that computes something on a stream of its own, which nobody waits for."""

    def forward(self, x):
        side = torch.Stream(x.device)
        side.wait_stream(current_stream(x.device))
        with side:
            self.beside = [(x * 2).sin(), side]
        x.record_stream(side)
        return x.tanh()


def test_results_on_another_stream_stay(devices):
    """The copy out waits for the compute stream alone."""
    mode = policy(CheckpointPolicy.MUST_CPU_OFFLOAD, aten.mul.Tensor)
    model = wrap([nn.Linear(32, 32), Beside(), nn.Linear(32, 32)], devices[:1], mode, M)
    with observe(jitter=0) as seen:
        y = model(torch.rand(8 * M, 16, 32, device=devices[0]))
    assert_no_races(seen)
    assert seen.transfers[0, "cpu"].bytes > 0
    del y


def test_what_the_cpu_keeps_is_there_already():
    model = wrap([nn.Linear(4, 4), Apply(lambda x: double(x).sin())], "cpu", "always", 2, [2])
    operator = torch.ops.torchgpipe_offloaded.double.default
    for choice, count in (("MUST_CPU_OFFLOAD", 2), ("MUST_SAVE", 2), ("MUST_RECOMPUTE", 4)):
        model.checkpoint = policy(CheckpointPolicy[choice], operator)
        calls.clear()
        model(torch.rand(4, 4)).sum().backward()
        assert len(calls) == count


class Overflow(nn.Module):
    """A layer that changes what its policy sends, for large inputs alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.a(x)
        return self.b(torch.tanh(y.mul_(2) if x[0, 0] > 1 else y))


def test_a_result_that_early_micro_batches_change_is_an_error(devices):
    model = wrap([Overflow()], devices[:1], SENT, M)
    x = torch.rand(96, 64, device=devices[0])
    x[:16] += 2
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match=r"mutated"):
        loss.backward()


def test_cells_without_a_recomputation_keep_all(devices):
    """The schedule recomputes some cells, and says so; a policy sends nothing of the others."""
    lines = "0F0 0F1 0F2 0F3 0R3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"
    schedule = parse(lines, [0, 1], 4)
    model = wrap([Attention() for _ in devices[:2]], devices[:2], SAVED, 4)
    training = ScheduledLoss(model, lambda y: y.pow(2).mean(), schedule)
    x = torch.rand(8, 16, 32, device=devices[0])
    with observe(costs=COSTS) as seen:
        training(x).backward()
    assert (0, "cpu") not in seen.transfers
