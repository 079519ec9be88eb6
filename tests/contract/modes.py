"""Modes, and what else the caller has set."""

import contextvars
import threading
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.contract.autograd import NO_GRAPH, pair, plain_loss, same
from tests.contract.promises import Otherwise, promise
from tests.contract.values import batch
from tests.contract.wrapped import assert_same_grads, linears, plain_step
from torchgpipe import is_recomputing

#: What casts leave of a number.
CAST = {"rtol": 2e-2, "atol": 2e-3}


# Training and evaluation.


class Counting(nn.Module):
    """A layer that logs how it is called."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(6, 6), log

    def __deepcopy__(self, memo):
        found = Counting(self.log)
        found.load_state_dict(self.state_dict())
        return found

    def forward(self, x):
        self.log.append((self.training, torch.is_inference_mode_enabled(), is_recomputing()))
        return self.linear(x).sin()


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


@promise("A layer that is in eval mode stays so while the model trains.", modes=True)
def frozen_norm(make):
    layers = moody()
    layers[1].eval()
    model = make(layers)
    for _ in range(2):
        x, y, *moved = batch(8, model)
        plain_step(layers, x, y)
        model.step(*moved)
        assert_same_grads(model, layers)


@promise(
    "Without grad, and in inference mode, each layer runs once for each micro-batch, and outputs "
    "and losses have no graph.",
    modes=True,
    devices=True,
    eager=True,
)
def no_grad(make):
    log = []
    layers = nn.Sequential(Counting(log), *linears(6, 6), Counting(log))
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
        assert model.all(log) == [(True, inference, False)] * 2 * 2 * 4
    plain_step(layers, x, y)
    model.step(*moved)
    assert_same_grads(model, layers)


# Autocast.


@promise("Autocast around a call casts in all layers, and in their second runs.", modes=True)
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

variable = contextvars.ContextVar("variable", default="unset")


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def changed(get, set, value):
    """A setting of the thread or of the process, for a while."""
    before = get()
    set(value)
    try:
        yield
    finally:
        set(before)


def settings():
    """What a layer can see of what is set."""
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        *(variable.get(), torch.get_num_threads()),
        *(torch.ones(1).dtype, torch.ones(1).device.type),
        *(torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()),
        *([type(x).__name__ for x in modes], torch._C._len_torch_dispatch_stack()),
    )


#: What a thread has set, and then what the process has.
OF_THREAD = {
    "nothing": [],
    "autocast": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "autocast off": [
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.autocast("cpu", enabled=False),
    ],
    "threads": [lambda: changed(torch.get_num_threads, torch.set_num_threads, 3)],
    "device": [lambda: torch.device("meta")],
    "function mode": [FunctionMode, FunctionMode],
    "dispatch mode": [DispatchMode],
    "context variable": [lambda: changed(variable.get, variable.set, "set")],
    "many": [FunctionMode, DispatchMode, lambda: torch.device("meta")],
}
SETTINGS = OF_THREAD | {
    "deterministic": [
        lambda: changed(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        )
    ],
    "dtype": [lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64)],
}


def entered(name):
    stack = ExitStack()
    for enter in SETTINGS[name]:
        stack.enter_context(enter())
    return stack


class Look(nn.Module):
    """A layer that logs what is set, in each of its runs."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(6, 6), log

    def __deepcopy__(self, memo):
        return Look(self.log)

    def forward(self, x):
        self.log.append((is_recomputing(), settings()))
        return self.linear(x).float().tanh()


def looking(make):
    """A wrapped model that logs, a batch, and the log."""
    log = []
    model = make(nn.Sequential(*[Look(log) for _ in range(4)]))
    return model, batch(8, model)[2:], log


@promise(
    "Layers see what the caller has set: autocast, modes, context variables, numbers of threads, "
    "defaults; in second runs, too, and the caller finds it as it was.",
    modes=True,
    eager=True,
)
def seen(make):
    model, moved, log = looking(make)
    for name in SETTINGS:
        log.clear()
        with entered(name):
            before = settings()
            loss = model.loss(*moved)
            after = settings()
            if loss.requires_grad and name not in OF_THREAD:
                loss.backward()
        if loss.requires_grad and name in OF_THREAD:
            loss.backward()
        found = model.all(log)
        assert len(found) >= 16
        again = {"never": [False], "always": [False, True]}.get(make.mode)
        assert again is None or sorted({x for x, _ in found}) == again, name
        assert all(x == before == after for _, x in found), (name, before, found)


@promise(
    "A second run in backward sees what was set around forward.",
    otherwise={"Pipe": NO_GRAPH},
    modes=True,
    eager=True,
)
def seen_again(make):
    model, moved, log = looking(make)
    for name in OF_THREAD:
        log.clear()
        before = settings()
        loss = model.loss(*moved)
        one = torch.ones_like(loss)
        with entered(name):
            around = settings()
            loss.backward(one)
            assert settings() == around, name
        assert all(x == before for _, x in model.all(log)), (name, before, log)


@promise(
    "A dispatch mode of the caller sees all operators: of layers, of second runs and of backward.",
    modes=True,
    devices=True,
    eager=True,
)
def flops(make):
    layers = linears(6, 6, 6)
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
    assert again == {"never": 0, "always": 1}.get(make.mode, again)
    assert again in {0, 1, 3 / 4, 3 / 8, 1 / 2, 5 / 8}, again


class Sines(TorchFunctionMode):
    """Replace one function by another."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


class SinesOfOperators(TorchDispatchMode):
    """Likewise, of operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = torch.ops.aten.sin.default if func is torch.ops.aten.tanh.default else func
        return func(*args, **(kwargs or {}))


@promise(
    "Modes of the caller may replace what layers call, while they are active.",
    modes=True,
    devices=True,
    eager=True,
)
def replaced(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    x, y, *moved = batch(8, model)
    for around in (SinesOfOperators, nullcontext, Sines, nullcontext):
        with around():
            expected = plain_step(layers, x, y)
            torch.testing.assert_close(model.step(*moved).cpu(), expected)
        assert_same_grads(model, layers)


@promise("A step may run in any thread.", modes=True)
def in_a_thread(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    errors = []

    def run():
        try:
            x, y, *moved = batch(8, model)
            plain_step(layers, x, y)
            model.step(*moved)
            assert_same_grads(model, layers)
        except BaseException as error:
            errors.append(error)

    run()
    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not errors


# Checkpoints of PyTorch.


class Checkpointed(nn.Module):
    """A layer that computes a part of itself again, by PyTorch's own checkpoint."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = linears(6, 6, 6), reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant) + x


@promise("A layer may use PyTorch's checkpoint.", modes=True)
def checkpoint_within(make):
    layers = nn.Sequential(*linears(6, 6), *[Checkpointed(False) for _ in range(2)])
    model, layers, plain, own = pair(make, layers)
    for _ in range(2):
        plain_step(layers, *plain)
        model.step(*own)
        assert_same_grads(model, layers)


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
