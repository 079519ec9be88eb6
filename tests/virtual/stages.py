"""Models of known cost, and the schedule's limits."""

from contextlib import contextmanager
from itertools import pairwise
from time import sleep

import torch

from benchmarks.simulate.critical import step_path
from tests.support.helpers import MODES, assert_no_races
from tests.support.size import some
from torchgpipe import is_recomputing
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import Busy, observe
from torchgpipe.testing.busy import busy

#: The checkpoint mode of tests that stand beside one of all modes; `make soak` takes all.
ONE_MODE = some(MODES, ["except_last"])

#: Seeds of the jitter.
SEEDS = range(some(50, 2))


class Stage(Busy):
    """A partition with costs F, R and B; the recomputation may cost another time than forward."""

    def __init__(self, forward=1, recompute=1, backward=2, features=4):
        # All for the weight: the input of the first partition needs no gradient.
        super().__init__(forward, 0, backward, features=features)
        self.recompute = float(recompute)

    def forward(self, x):
        forward, *others = self.costs
        costs = (self.recompute if is_recomputing() else forward, *others)
        return busy(x.tanh(), self.weight, costs, self.name)


class Lagging(Stage):
    """A stage that makes the host slow in backward."""

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: sleep(0.002))
        return y


#: How many times as wide as what is passed on a skip is.
WIDER = 5


@skippable(stash=["skip"])
class Stashing(Stage):
    def forward(self, x):
        yield stash("skip", (x * self.weight).repeat(1, WIDER))
        return super().forward(x)


@skippable(pop=["skip"])
class Popping(Stage):
    def forward(self, x):
        skip = yield pop("skip")
        return super().forward(x + skip[:, :4])


def squares(output, target):
    """A loss without an operator of its own, whose saved tensors are known."""
    return ((output - target) ** 2).mean()


def limit(mode, n, m, F=1, R=1, B=2):  # noqa: N803 (the field's names)
    """The makespan of n equal stages and m micro-batches, with copies that take no time."""
    return step_path(mode, m, [F] * n, [R] * n, [B] * n)


@contextmanager
def own_streams(devices, wanted=True):
    """Use other current streams for the caller, one on each device, within a ``with`` block."""
    if not wanted:
        yield
        return
    before = [torch.accelerator.current_stream(device) for device in devices]
    for device, stream in zip(devices, before):
        own = torch.Stream(device)
        own.wait_stream(stream)
        torch.accelerator.set_stream(own)
    torch.accelerator.set_device_index(0)
    try:
        yield
    finally:
        for stream in before:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(0)


def makespans(model, *, rows=2, seed=None, requires_grad=False, steps=2, **observed):
    """Makespans of some steps in a row, which must not race."""
    x = torch.rand(model.chunks * rows, 4, device=model.devices[0], requires_grad=requires_grad)
    spans = [0.0]
    with observe(jitter=seed, **observed) as seen:
        for _ in range(steps):
            model(x).sum().backward()
            spans.append(seen.makespan)
    assert_no_races(seen)
    return [b - a for a, b in pairwise(spans)]


def verify_steps(pipe, plain, x, makespan, seeds):
    """Check races, gradients and the time of steps, beside a plain model that has its gradients."""
    first = next(iter(pipe.device_map.values()))
    for seed in (None, *seeds):
        pipe.zero_grad()
        with observe(jitter=seed) as seen:
            pipe(x.to(first)).square().sum().backward()
        assert_no_races(seen)
        for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.cpu(), other.grad)
        assert seen.makespan == makespan
