"""Modes, and what else the caller has set."""

import contextvars
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.contract.autograd import NO_GRAPH, pair, plain_loss, same
from tests.contract.promises import POLICY, Otherwise, promise
from tests.contract.values import batch
from tests.contract.wrapped import assert_same_grads, linears, plain_step, trained
from tests.unit.ambient.test_context import MODES, entered
from torchgpipe import _torch, is_recomputing
from torchgpipe.ambient.context import Modes

#: What casts leave of a number.
CAST = {"rtol": 2e-2, "atol": 2e-3}


variable = contextvars.ContextVar("variable", default="unset")


def settings():
    """Return what is set, but for what differs for cells: autocast's cache, and a policy's mode."""
    modes = Modes.current()
    counting = _torch.KeepingMode, _torch.GivingMode
    seen = tuple([mode for mode in modes.dispatch if not isinstance(mode, counting)])
    modes = modes._replace(cache=False, dispatch=seen)
    return modes, variable.get(), torch.ones(1).device, torch.is_anomaly_enabled()


class Look(nn.Module):
    """A layer that logs what is set, in each of its runs."""

    def __init__(self, note):
        super().__init__()
        # A function: a list would be put back for recomputations, as several layers add to it.
        self.linear, self.note = nn.Linear(6, 6), note
        # A graph would not log: what layers do besides computing is done while they are traced. A
        # stage with hooks is eager.
        self.register_forward_hook(lambda *_: None)

    def __deepcopy__(self, memo):
        found = Look(self.note)
        found.load_state_dict(self.state_dict())
        return found

    def forward(self, x):
        self.note((is_recomputing(), settings()))
        return self.linear(x).float().tanh()


# Training and evaluation.


def moody():
    """Layers that compute otherwise in eval mode, with statistics that are not the first ones."""
    norm = nn.BatchNorm1d(6)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    inner = nn.Sequential(*linears(6, 6), nn.Dropout(0.5), norm)
    return nn.Sequential(nn.Linear(6, 6), inner, *linears(6, 6, 6))


@promise("In eval mode outputs and losses are those of the plain model.", modes=True, devices=True)
def evaluation(make):
    layers = moody()
    model = make(layers)
    for training in (False, True, False):
        layers.train(training)
        model.train(training)
        x, y, *moved = batch(7, model)
        assert all(layer.training == training for layer in model.model.modules())
        if not training:
            expected = layers(x).detach(), plain_loss(layers, x, y).detach()
            found = model.forward(moved[0]), model.loss(*moved)
            torch.testing.assert_close([x.detach().cpu() for x in found], [*expected])


ALONE = Otherwise("In eval mode it computes the loss alone.", "does not require grad")


@promise(
    "In eval mode there are gradients, too, and cells are computed again as in training.",
    otherwise={"Pipe": ALONE},
    modes=True,
    eager=True,
)
def eval_gradients(make):
    log, counts = [], []
    layers = nn.Sequential(*[Look(log.append) for _ in range(4)])
    model, layers, plain, own = pair(make, layers)
    for training in (False, True):
        model.train(training)
        plain_step(layers, *plain)
        log.clear()
        model.loss(*own).backward()
        assert_same_grads(model, layers)
        counts.append([again for again, _ in log].count(True))
    assert counts[0] == counts[1]


class Partly(nn.Module):
    """A layer that changes the grad mode itself."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.no_grad():
            scale = self.one(x).abs().mean(1, keepdim=True)
            with torch.enable_grad():
                y = self.one(x)
        return (self.other(x) / scale + y).tanh()


@promise("Layers may leave and enter grad mode themselves.", modes=True, devices=True)
def partly_without_grad(make):
    layers = nn.Sequential(*[Partly() for _ in range(4)])
    trained(make(layers), layers)


@promise("A layer that is in eval mode stays so while the model trains.", modes=True)
def frozen_norm(make):
    layers = moody()
    layers[1].eval()
    trained(make(layers), layers)


@promise(
    "Without grad, and in inference mode, layers run once per micro-batch, and leave no graph.",
    modes=True,
    devices=True,
    eager=True,
)
def no_grad(make):
    log = []
    layers = nn.Sequential(Look(log.append), *linears(6, 6), Look(log.append))
    model = make(layers)
    x, y, *moved = batch(8, model)
    with torch.no_grad():
        expected = layers(x), F.mse_loss(layers(x), y)
    for mode in (torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)):
        log.clear()
        with mode():
            inference = torch.is_inference_mode_enabled()
            found = model.forward(moved[0]), model.loss(*moved)
        torch.testing.assert_close([x.cpu() for x in found], [*expected])
        assert not any(x.requires_grad for x in found)
        runs = model.all([(again, modes.inference) for again, (modes, *_) in log])
        assert runs == [(False, inference)] * 2 * 2 * 4
    trained(model, layers)


# Autocast.


@promise("Autocast around a call casts in all layers, and in their recomputations.", modes=True)
def autocast(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    optimizers = [torch.optim.SGD(some.parameters(), 0.5) for some in (layers, model.layers)]
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        x, y, *moved = batch(8, model)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            expected = plain_loss(layers, x, y)
            found = model.step(*moved)
            assert model.forward(moved[0]).dtype == dtype
        expected.backward()
        torch.testing.assert_close(found, expected.detach(), **CAST)
        assert_same_grads(model, layers, **CAST)
        # Casts of the weights as they were must not be used in the next step.
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Casting(nn.Module):
    """A layer with an autocast of its own, and one without within that."""

    def __init__(self):
        super().__init__()
        self.cast, self.whole = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.cast(x)
            assert y.dtype == torch.bfloat16
            with torch.autocast("cpu", enabled=False):
                return self.whole(y.float()).tanh()


@promise("Layers may enter and leave autocast themselves.", modes=True)
def autocast_within(make):
    layers = nn.Sequential(*linears(6, 6), Casting(), Casting())
    model = make(layers)
    for around in (False, True):
        x, y, *moved = batch(8, model)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            expected = plain_loss(layers, x, y)
            model.step(*moved)
        expected.backward()
        assert_same_grads(model, layers, **CAST)


# What else is set.


def looked(make, backward=None):
    """Check what layers see under each set of modes, and under that of a backward outside."""
    log = []
    model = make(nn.Sequential(*[Look(log.append) for _ in range(4)]))
    moved = batch(8, model)[2:]
    for name in [x for x in MODES if not backward or "inference" not in x]:
        log.clear()
        variable.set(name)
        with warnings.catch_warnings(), nullcontext() if backward else entered(name):
            warnings.filterwarnings("ignore", "under autocast to float16")
            before = settings()
            loss = model.loss(*moved)
            assert settings() == before
        variable.set("later")
        # The caller's own gradient is made outside.
        one = torch.ones_like(loss)
        with entered(name) if backward else nullcontext():
            around = settings()
            if backward or loss.requires_grad:
                loss.backward(one)
            assert settings() == around
        assert len(log) >= 2 * 4
        assert all(x == before for _, x in log), (name, before, log)
        again = {"never": [False], "always": [False, True]}.get(make.again)
        if loss.requires_grad and again:
            assert sorted({x for x, _ in log}) == again, name


@promise(
    "Layers see the modes and context variables of the caller, who finds them as they were.",
    modes=True,
    devices=True,
    eager=True,
)
def seen(make):
    looked(make)


@promise(
    "A recomputation in backward sees what was set around forward.",
    otherwise={"Pipe": NO_GRAPH},
    modes=True,
    devices=True,
    eager=True,
)
def seen_again(make):
    looked(make, backward=True)


@promise(
    "A dispatch mode of the caller sees all operators, also of recomputations and backward.",
    otherwise={
        POLICY: Otherwise(
            "Under a policy, PyTorch refuses operators that it has not counted in the first run, "
            "such as those of FlopCounterMode's hooks, which view the inputs of modules.",
            "encountered during backward but not found",
            since=(2, 12),
        )
    },
    modes=True,
    devices=True,
    eager=True,
)
def flops(make):
    # A linear layer on its own keeps no more than its input and its weight.
    layers = nn.Sequential(linears(6, 6), linears(6, 6))
    model = make(layers)
    x, y, *moved = batch(8, model)
    totals = []
    for step in (lambda: plain_step(layers, x, y, chunks=4), lambda: model.step(*moved)):
        with FlopCounterMode(display=False) as counter:
            step()
        totals.append(counter.get_total_flops())
    assert_same_grads(model, layers)
    once = 2 * 2 * 8 * 6 * 6
    again = (sum(model.all([totals[1]])) - totals[0]) / once
    # A schedule may compute less again, where backward of a cell comes right after its forward.
    # The policy keeps all products.
    counts = {"never": 0, "always": 1, POLICY: 0}
    twin = POLICY if make.mode == POLICY else make.again
    assert again == counts.get(twin, again), again
    assert again in {0, 1, 3 / 4, 3 / 8, 1 / 2, 5 / 8}, again


class Sines(TorchFunctionMode):
    """Replace one function by another."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class SinesOfOperators(TorchDispatchMode):
    """The same, of operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = torch.ops.aten.sin.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


class Placed(nn.Module):
    """A layer that computes by the default device."""

    def forward(self, x):
        return x * 2 if torch.ones(()).device.type == "meta" else x


@promise(
    "Modes of the caller may replace what layers call, while they are active.",
    modes=True,
    devices=True,
    eager=True,
)
def replaced(make):
    layers = nn.Sequential(*linears(6, 6), Placed(), *linears(6, 6))
    model = make(layers)
    x, y, *moved = batch(8, model)
    meta = partial(torch.device, "meta")
    for around in (SinesOfOperators, nullcontext, meta, Sines, nullcontext):
        with around():
            expected = plain_step(layers, x, y)
            torch.testing.assert_close(model.step(*moved).cpu(), expected)
        assert_same_grads(model, layers)


@promise("A step may run in any thread.", modes=True)
def in_a_thread(make):
    model, layers, plain, own = pair(make)
    plain_step(layers, *plain)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.step, *own).result()
    assert_same_grads(model, layers)


# Checkpoints of PyTorch.


class Checkpointed(nn.Module):
    """A layer that computes a part of itself again, by PyTorch's own checkpoint."""

    def __init__(self):
        super().__init__()
        self.inner = linears(6, 6, 6)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) + x


@promise(
    "A layer may use PyTorch's checkpoint, also with a weight that layers on other devices have.",
    modes=True,
    devices=True,
)
def checkpoint_within(make):
    layers = nn.Sequential(*linears(6, 6), *[Checkpointed() for _ in range(2)])
    layers[3].inner[0].weight = layers[2].inner[2].weight = layers[0].weight
    trained(make(layers), layers)


WITHIN_CALL = Otherwise(
    "It runs backward within the call, which is no part of a checkpoint.",
    "call it outside of checkpoint",
)


@promise(
    "PyTorch's checkpoint around the call computes it again.",
    otherwise=dict.fromkeys(["ScheduledLoss", "ScheduledLoss of graphs", "Pipe"], WITHIN_CALL),
    modes=True,
    devices=True,
    fails=True,
)
def checkpoint_around(make):
    model, layers, plain, own = pair(make)
    for _ in range(2):
        plain_loss(layers, *plain).backward()
        checkpoint(model.loss, *own, use_reentrant=False).backward()
        assert_same_grads(model, layers)
    same([own[0].grad], [plain[0].grad])
