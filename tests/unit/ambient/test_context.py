"""Context: settings that are carried from thread to thread."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.checkpoints import old_checkpoint
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.ambient.context import Context, Modes, SavedSettings, current_hooks


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def number_of_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def autocast_dtype(dtype):
    """The dtype of an autocast without a dtype."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", dtype)
    try:
        yield
    finally:
        torch.set_autocast_dtype("cpu", before)


MODES = {
    "default": [],
    "no_grad": [torch.no_grad],
    "inference_mode": [torch.inference_mode],
    "autocast": [lambda: torch.autocast("cpu", torch.bfloat16)],
    "autocast off within autocast": [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", enabled=False),
    ],
    "autocast in float16, without cache": [
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)
    ],
    "autocast's dtype": [lambda: autocast_dtype(torch.float16)],
    "no_grad and autocast": [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    "grad within inference_mode": [torch.inference_mode, torch.enable_grad],
    "no multithreading": [lambda: torch.autograd.set_multithreading_enabled(False)],
    "three threads": [lambda: number_of_threads(3)],
    "device": [lambda: torch.device("meta")],
    "function modes": [FunctionMode, FunctionMode],
    "dispatch modes": [DispatchMode, DispatchMode],
    "many": [
        lambda: number_of_threads(2),
        lambda: torch.device("meta"),
        torch.no_grad,
        FunctionMode,
        DispatchMode,
    ],
}


def entered(name):
    stack = ExitStack()
    for mode in MODES[name]:
        stack.enter_context(mode())
    return stack


@pytest.mark.parametrize("inner", MODES)
@pytest.mark.parametrize("outer", MODES)
def test_carried_into_any_other(inner, outer):
    with entered(inner):
        context = Context()
    with entered(outer):
        before = Modes.current()
        with context.entered(SavedSettings([])):
            assert Modes.current() == context.modes
        assert Modes.current() == before


def test_a_thread_keeps_the_number_of_threads_that_it_was_lent():
    found = []

    def run():
        context.use_callers_threads()
        with context.entered(SavedSettings([])):
            pass
        found.append(torch.get_num_threads())

    with number_of_threads(3):
        context = Context()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert found == [3]


def test_casts_of_weights_are_forgotten():
    """A context enters without old casts of weights, since weights may have changed."""
    weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        context = Context()
    for value in (1.0, 2.0):
        weight.data.fill_(value)
        with context.entered(SavedSettings([])):
            assert (x @ weight)[0, 0] == 2 * value


@pytest.mark.parametrize(
    ("name", "alone"),
    [(name, "function" in name or "dispatch" in name or name == "many") for name in MODES],
)
def test_what_only_the_caller_may_compute_in(name, alone):
    with entered(name):
        assert Context().alone is alone


class Checkpointed(nn.Module):
    """A layer within a checkpoint that may fail; it notes the hooks and modes that it finds."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails, self.found = nn.Linear(3, 3), False, set()

    def run(self, x):
        if self.fails:
            raise ArithmeticError
        return self.layer(x)

    def forward(self, x):
        self.found.add((current_hooks(), Modes.current().dispatch))
        return old_checkpoint(self.run, x)


def step_of(wrapper):
    layers = nn.Sequential(Checkpointed(), Checkpointed())
    model = GPipe(layers, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint="never")
    x = torch.rand(4, 3)
    if wrapper == "ScheduledLoss":
        return layers, partial(ScheduledLoss(model, F.mse_loss, "1f1b"), x, x)
    return layers, partial(model, x)


@pytest.mark.parametrize("wrapper", ["GPipe", "ScheduledLoss"])
@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("is_main", [False, True])
def test_checkpoint_of_pytorch_that_fails(wrapper, is_hooked, is_main):
    layers, step = step_of(wrapper)

    def steps():
        with saved_tensors_hooks(abs, abs) if is_hooked else nullcontext():
            mine = current_hooks(), ()
            step()
            layers[1].fails = True
            with pytest.raises(ArithmeticError):
                step()
            layers[1].fails = False
            assert (current_hooks(), Modes.current().dispatch) == mine
            step()
        assert layers[0].found == layers[1].found == {mine}
        assert current_hooks() is None

    if is_main:
        steps()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(steps).result()


def test_error_while_one_of_a_checkpoint_is_handled():
    layers, step = step_of("GPipe")
    layers[1].fails = True
    with saved_tensors_hooks(abs, abs):
        mine = current_hooks()
        try:
            layers(torch.rand(4, 3))
        except ArithmeticError:
            before = current_hooks()
            with pytest.raises(ArithmeticError):
                step()
            assert current_hooks() == before
        assert current_hooks() == mine


def test_errors_that_refer_to_each_other():
    one, other = KeyError(), ValueError()
    one.__context__, other.__context__ = other, one
    with pytest.raises(KeyError), SavedSettings([]):
        raise one
