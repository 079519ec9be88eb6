"""Sandboxes: copies of layers that run again and again on a device, to be measured there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from statistics import median, median_low
from time import monotonic
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.ambient.generators import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.devices.recorder import Stopwatch, memory_free
from torchgpipe.devices.streams import use_device
from torchgpipe.partition.placement import place, tensors
from torchgpipe.recompute.once import updated_in, updates
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

#: How many times the noise of their kind the times of layers differ that are alike.
NOISE = 4

#: As few rounds as tell how far a time varies.
LEAST = 3

#: As few rounds as have quartiles.
MANY = 8

#: Times are equal if they differ by less than this share of the longest one. No clock of a real
#: device tells so little apart, and a simulated one rounds its sums by less.
EQUAL = 1e-9


def rounds(
    timeout: float | None, samples: Callable[[], Collection[Sequence[float]]]
) -> Iterator[None]:
    """Yield until a time is over, and :data:`LEAST` times at least; not at all without a time.

    If times are equal in so many rounds, as on a simulated clock, more would tell nothing.

    Args:
        timeout: the seconds.
        samples: finds what each time has been over the rounds so far.
    """
    start, count = monotonic(), 0
    while timeout is not None and (count < LEAST or monotonic() - start < timeout):
        yield
        count += 1
        if count == LEAST and _are_equal(samples()):
            return


def _are_equal(samples: Collection[Sequence[float]]) -> bool:
    """Whether each time has been the same in all rounds."""
    least = EQUAL * max(map(max, samples), default=0.0)
    return all(max(x) - min(x) <= least for x in samples)


def undisturbed(times: Sequence[float]) -> float:
    """The time that something takes undisturbed: the lower quartile of its times over rounds.

    Noise only adds time. The minimum would be nearer to the truth for work that is the same each
    time, but a layer may skip its work at random, as with stochastic depth. Of fewer than
    :data:`MANY` rounds it is the minimum, since of so few, noise is the greater danger.
    """
    return sorted(times)[(len(times) - 1) // 4 if len(times) >= MANY else 0]


def verify_timed(times: Sequence[float], device: object, what: str, elsewhere: str) -> None:
    """Check that anything takes time, before it is balanced by it."""
    if not any(times):
        raise ValueError(
            f"{what} must take time to be balanced by it, and on virtual accelerators only what "
            f"has a cost does (device: {device}, times: 0 for all {len(times)} {what}); measure "
            "within torchgpipe.testing.observe(costs='measured'), or with costs of what they call, "
            f"as in costs={{'addmm': 1.0}}, or {elsewhere}"
        )


def pooled(kinds: Sequence[Hashable], samples: Sequence[Sequence[float]]) -> list[float]:
    """The undisturbed time of each layer, one for those that nobody can tell apart.

    Equal blocks are the rule in large models, and the middle of several measurements is surer than
    each. But a kind is only what can be seen from outside. So a layer keeps its own time if that is
    far from the middle one of its kind.
    """
    times, groups = [*map(undisturbed, samples)], dict[Hashable, list[int]]()
    found = [*times]
    for k, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(k)
    for group in groups.values():
        # A layer of them, and no mean of two, which might be like neither.
        middle = median_low(times[k] for k in group)
        noise = NOISE * median(median(samples[k]) - times[k] for k in group)
        near = [k for k in group if abs(times[k] - middle) <= noise]
        for k in near:
            found[k] = median(times[k] for k in near)
    return found


Sample = TypeVar("Sample", bound=tuple[float, ...])


class Given(torch.autograd.Function):
    """A clone, whose gradient goes nowhere: as a leaf's, it might be copied.

    A layer may change it in place, which autograd forbids for leaves.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Sandbox:
    """A copy of a layer that runs on one input, again and again.

    The first run is a warm-up: it may allocate memory that stays, such as the workspace of a
    library, or compile the layer. With the input come all skips that were stashed and not popped.
    """

    def __init__(self, layer: nn.Module, batch: Batch, device: torch.device) -> None:
        self.layer, self.batch, self.device = layer, batch, device
        self.stopwatch = Stopwatch(device)
        #: The input of the next layer.
        self.output = batch
        _, self.output = self._run()

    def sample(self) -> tuple[float, float]:
        """Run the layer, and return the seconds of its forward and of its backward."""
        return self._run()[0]

    def _run(self) -> tuple[tuple[float, float], Batch]:
        batch = self.input()
        self.stopwatch.start()
        output = self.forward(batch)
        forward, backward, roots = self.stopwatch.stop(), 0.0, self.roots(output)
        if roots:
            grads = [torch.ones_like(x) for x in roots]
            self.stopwatch.start()
            torch.autograd.backward(roots, grads)
            backward = self.stopwatch.stop()
        self.layer.zero_grad()
        return (forward, backward), leaves(output)

    def input(self) -> Batch:
        """A copy of the input, which nothing else refers to."""
        return self.batch.replace([Given.apply(x) for x in leaves(self.batch)])

    def forward(self, batch: Batch) -> Batch:
        """Run the layer; the output has the skips, too."""
        tracker = SkipTracker.of(batch)
        with use_skip_tracker(tracker), updates(updated_in(self.layer)):
            return batch.call(self.layer).with_skips(tracker.parts())

    def entries(self, batch: Batch) -> list[Tensor]:
        """The tensors of an input that get a gradient, skips that are popped among them."""
        keys = [VALUE, *[x for x in batch.skips if x not in self.output.skips]]
        return [x for key in keys for x in batch.parts[key] if x.requires_grad]

    def roots(self, output: Batch) -> list[Tensor]:
        """The outputs that backward begins with; skips that pass by the layer have none here."""
        own = [x for key, x in output.parts.items() if key not in self.batch.skips]
        return [x for x in chain(*own) if x.requires_grad]


class Sandboxes:
    """The copies of all layers, each with its input: the output of the one before."""

    def __init__(self, module: nn.Sequential, batch: Batch, device: torch.device) -> None:
        self.titles = {
            f"{name} ({type(layer).__name__})": layer
            for name, layer in module._modules.items()
            if layer is not None
        }
        self.batch, self.device = batch, device
        # A model may be larger than the device, so the copies of layers stay there only if all of
        # them, with their inputs, fit into half of what is free. The other half is for what a layer
        # needs while it runs. A model that is larger has one copy at a time, made anew in each
        # round. That is slower. But to keep some copies would be no better: the next layer may be
        # the one that needs the whole device.
        self.room = memory_free(device) / 2
        self.kept: dict[str, Sandbox] = {}

    def each(self, visit: Callable[[str, Sandbox], None]) -> None:
        """Call a function with the title and the sandbox of each layer, which is warm, in order.

        An exception takes a note that says which layer raised it.
        """
        batch = self.batch
        for title in self.titles:
            with noted(f"raised while layer {title} was profiled"):
                batch = self._visited(title, batch, visit)

    def _visited(self, title: str, batch: Batch, visit: Callable[[str, Sandbox], None]) -> Batch:
        # Only this frame has a sandbox that is not kept: it is freed before the next one is made.
        sandbox = self.kept.get(title) or self._made(title, batch)
        visit(title, sandbox)
        return sandbox.output

    def _made(self, title: str, batch: Batch) -> Sandbox:
        layer = self.titles[title]
        self.room -= sum(x.nbytes for x in {*batch, *[x for _, x in tensors(layer)]})
        # Once there is no room there never is: in later rounds layers take away more of it.
        if self.room < 0:
            self.kept.clear()
        sandbox = Sandbox(copied(layer, self.device), batch, self.device)
        if self.room >= 0:
            self.kept[title] = sandbox
        return sandbox


def in_rounds(
    module: nn.Sequential,
    batches: Iterable[Batch],
    see: Callable[[int, str, Sandbox], None],
    take: Callable[[Sandbox], Sample],
    device: torch.device,
    *,
    timeout: float | None,
    progress: bool,
) -> list[dict[str, list[Sample]]]:
    """Run layers on a device: once to look at them, and then in rounds to take times.

    All are measured once in each round, so that noise, which lasts for a while, falls on all alike.
    Random numbers that the caller draws next stay as they are. A layer is seen with the number of
    the size, and its title. A timeout of None takes no times.

    Returns:
        For each size, what was taken in each round, by the titles.
    """
    numbers = FirstNumbers(device)

    def measure() -> list[dict[str, list[Sample]]]:
        sizes = [Sandboxes(module, brought(x, device), device) for x in batches]
        found: list[dict[str, list[Sample]]] = [{x: [] for x in own.titles} for own in sizes]
        with _bar(progress) as bar:

            def visit(k: int, is_first: bool, title: str, sandbox: Sandbox) -> None:
                if is_first:
                    see(k, title, sandbox)
                else:
                    found[k][title].append(take(sandbox))
                bar.update()

            for number, _ in enumerate(chain([None], rounds(timeout, lambda: _times_of(found)))):
                for k, own in enumerate(sizes):
                    own.each(partial(visit, k, not number))
        return found

    def within() -> list[dict[str, list[Sample]]]:
        with use_device(device), numbers.restored(), torch.inference_mode(False):
            return torch.enable_grad()(measure)()

    return holding(numbers.locks, within)


def _times_of(found: Sequence[dict[str, list[Sample]]]) -> list[Sequence[float]]:
    """All times, each over the rounds."""
    return [times for own in found for taken in own.values() for times in zip(*taken)]


def _bar(is_shown: bool) -> Any:
    """Context manager for a progress bar, or for nothing that looks like one."""
    if not is_shown:
        return nullcontext(SimpleNamespace(update=lambda: None))
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm (progress: True); run `pip install tqdm`"
        ) from error
    return tqdm(desc="profile", unit="layer")


def brought(batch: Batch, device: torch.device) -> Batch:
    """A micro-batch on a device, as the beginning of a graph."""
    return leaves(batch.map(lambda *xs: [x.to(device) for x in xs], [VALUE]))


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer on a device and in train mode."""
    copy = deepcopy(layer)
    copy.train()
    place([copy], [device])
    return copy


def leaves(batch: Batch) -> Batch:
    """The same values without what they were computed from."""
    return batch.replace([x.detach().requires_grad_(x.requires_grad) for x in batch])
