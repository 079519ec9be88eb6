"""Layers that raise where a plan says so: in a kind of run of a certain micro-batch.

The first column of what passes between layers is the number of the micro-batch. What raises is an
operator, so graphs of stages raise, too.
"""

import faulthandler
import threading
from collections import Counter
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch
from torch import nn

from tests.support.helpers import MODES
from tests.support.size import some
from torchgpipe.ambient import context as thread
from torchgpipe.ambient.context import Modes, autocast_nesting, current_hooks
from torchgpipe.engine import workers

#: The seconds after which a step is said to hang: all threads are printed, and the process ends.
PATIENCE = 60

#: Sizes of the data.
CHUNKS, WIDTH = 3, 4

#: What may fail.
KINDS = ("forward", "backward", "recomputation", "loss", "backward of loss", "hook")


class PlannedError(ValueError):
    """The error."""


class Plan:
    """The error to come, in a kind of run of a micro-batch, and the count of all runs."""

    def __init__(self):
        self.kind = self.number = self.error = None
        self.runs, self.lock = Counter(), threading.Lock()

    def __call__(self, kind, number, error=None):
        # Where the loss is outside, it is that of the whole mini-batch.
        self.kind, self.number = kind, 0 if "loss" in kind else number
        self.error = PlannedError("as planned") if error is None else error
        return self

    def __enter__(self):
        self.runs.clear()
        return self.error

    def __exit__(self, *_):
        # Its traceback holds the step.
        self.kind = self.error = None

    def comes(self, kind, marker):
        number = int(marker.flatten()[0])
        with self.lock:
            self.runs[kind, number] += 1
            if self.kind == "anything" and self.runs.total() == self.number:
                raise self.error
        if kind == "forward" and self.runs[kind, number] > 1:
            kind = "recomputation"
        if (kind, number) == (self.kind, self.number):
            if callable(self.error):
                self.error()
            else:
                raise self.error


plan = Plan()


@torch.library.custom_op("torchgpipe_contract::comes", mutates_args=())
def comes(x: torch.Tensor, marker: torch.Tensor, kind: str) -> torch.Tensor:
    """The identity, which may raise, and so may its backward."""
    plan.comes(kind, marker)
    return x.clone()


comes.register_fake(lambda x, marker, kind: torch.empty_like(x))


def _keep(ctx, inputs, output):
    _, marker, ctx.kind = inputs
    ctx.save_for_backward(marker)


def _backward(ctx, grad):
    kind = "backward" if ctx.kind == "forward" else f"backward of {ctx.kind}"
    return comes(grad, *ctx.saved_tensors, kind), None, None


comes.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    """A layer that keeps the first column, and may draw; ``comes`` says whether it may raise."""

    def __init__(self, comes=False, draws=0.0):
        super().__init__()
        self.linear, self.dropout, self.comes = nn.Linear(3, 3), nn.Dropout(draws), comes

    def forward(self, x):
        marker, x = x[:, :1], x[:, 1:]
        if self.comes:
            x = comes(x, marker.detach(), "forward")
        return torch.cat([marker, self.dropout(self.linear(x).sin())], 1)


class Hooked(Layer):
    """A layer that also has a hook in backward, which may raise."""

    def forward(self, x):
        y, number = super().forward(x), x[:, :1].detach().clone()
        if y.requires_grad:
            y.register_hook(lambda _: plan.comes("hook", number))
        return y


def loss(output, target):
    """A loss that may raise."""
    output = comes(output, output[:, :1].detach(), "loss")
    return (output - target).square().mean()


def layers(make):
    """Layers of which the second one may raise."""
    torch.manual_seed(0)
    # A stage whose layers register hooks is eager.
    kind = Layer if make.wrapper == "ScheduledLoss of graphs" else Hooked
    return nn.Sequential(Layer(False, 0.2), kind(True, 0.2), Layer(False, 0.2), Layer())


def made(make, steps=2, **options):
    """A model after two steps, in which graphs are made."""
    model = make(layers(make), chunks=CHUNKS, loss=loss, **options)
    for _ in range(steps):
        step(model)
    return model


def step(model, autocast=False):
    """Take a step with always the same data and numbers; return the loss and the gradients."""
    torch.manual_seed(1)
    numbers = torch.arange(CHUNKS).repeat_interleave(2)[:, None]
    x, y = torch.cat([numbers, torch.rand(2 * CHUNKS, 3)], 1), torch.rand(2 * CHUNKS, 4)
    model.zero_grad()
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        with torch.autocast(model.first.type, torch.bfloat16, enabled=autocast):
            found = model.step(x.to(model.first), y.to(model.last)).cpu()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return [found, *model.grads.values()]


def same(found, expected):
    """Compare two steps bit for bit."""
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


def settings():
    """The settings of this thread, of a new one, and of each worker that runs."""
    found = {threading.current_thread(): _of_thread()}
    new = SimpleQueue()
    beside = threading.Thread(target=lambda: new.put(_of_thread()))
    beside.start()
    beside.join()
    found["new"] = new.get()
    for worker, submit in dict(workers._threads).items():
        answers = SimpleQueue()
        submit(lambda answers=answers: answers.put(_of_thread()))
        # It may have been told to end.
        while worker not in found and worker.is_alive():
            with suppress(Empty):
                found[worker] = answers.get(timeout=0.1)
    return found


def _of_thread():
    values = []
    for local, own in zip(thread._registered, thread.saved()):
        # A new thread has the defaults of the class.
        names = [name for name in vars(type(local)) if not name.startswith("_")] + [*own]
        # The layer that has run last has no effect.
        values.append({name: getattr(local, name) for name in names if name != "kind"})
    # Nor has the number of threads of an operator, which each worker takes from its caller anew.
    return Modes.current()._replace(threads=0), autocast_nesting(), current_hooks(), values


def verify(before):
    """Check the settings of threads, some of which may end, and begin."""
    for worker, values in settings().items():
        expected = before.get(worker, before["new"])
        assert values == expected, (values, expected)


def verify_anywhere(model, autocast):
    """Have each operator and hook of a step raise, or two of them, and check what follows."""
    expected = step(model, autocast)
    with plan("nothing", 0):
        step(model, autocast)
        count = plan.runs.total()
    for k in some(range(1, count + 1), (1 + 7 * count // 17, count)):
        before = settings()
        with plan("anything", k):
            assert model.raised(step, model, autocast)
        verify(before)
        same(step(model, autocast), expected)


def verify_early(new):
    """Have an operator of the first or second step raise, and compare the steps that follow."""
    whole = new()
    expected = [step(whole) for _ in range(3)]
    for number in range(2):
        for k in some(range(1, 20, 3), (7,)):
            model = new()
            for _ in range(number):
                step(model)
            with plan("anything", k):
                error = model.raised(step, model)
            # A step without checkpoints calls fewer functions.
            assert error or k > 7
            if not error:
                break
            for values in expected:
                same(step(model), values)


def kinds(model):
    """The kinds of runs that may fail; one of them where nothing follows an error."""
    mode = model.maker.again
    without = {"recomputation"} if mode == "never" else set()
    without |= set() if isinstance(model.layers[1], Hooked) else {"hook"}
    found = [x for x in KINDS if x not in without]
    return found if model.lasts else found[MODES.index(mode) :][:1]
