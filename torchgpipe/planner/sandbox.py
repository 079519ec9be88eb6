"""Sandboxes: copies of layers that run on a device again and again, to be measured there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.devices.measures import Stopwatch, memory_free
from torchgpipe.devices.streams import use_device
from torchgpipe.partition.placement import place, tensors
from torchgpipe.planner.rounds import LEAST, rounds
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch

__all__: list[str] = []

Sample = TypeVar("Sample")


class Sandbox:
    """A copy of a layer that runs on one input, again and again.

    The first run is a warm-up: it may allocate memory that stays, such as the workspace of a
    library, or compile the layer.

    Args:
        layer: the copy.
        batch: its input, and all skips that were stashed before and not popped.
        device: the device of both.
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
        # A layer may change its input in place, which autograd forbids for leaves, not clones.
        return self.batch.replace([x.clone() for x in leaves(self.batch)])

    def forward(self, batch: Batch) -> Batch:
        """Run the layer; the output has the skips, too."""
        tracker = SkipTracker.of(batch)
        with use_skip_tracker(tracker):
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
    """The copies of all layers, each with its input: the output of the one before.

    Args:
        module: the layers.
        batch: the input of the first one.
        device: the device of the copies.
    """

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
    make: Callable[[], Sequence[Sandboxes]],
    see: Callable[[int, str, Sandbox], None],
    take: Callable[[Sandbox], Sample],
    device: torch.device,
    *,
    timeout: float | None,
    progress: bool,
) -> list[dict[str, list[Sample]]]:
    """Run layers on a device: once to look at them, and then in rounds to take times.

    Random numbers that the caller draws next stay as they are.

    Args:
        make: makes the sandboxes of layers, for each size of micro-batch.
        see: looks at a layer, with the number of the size, and its title.
        take: takes the times of a layer.
        device: the device.

    Keyword Args:
        timeout: the seconds to take times; None takes none.
        progress: whether to show a progress bar.

    Returns:
        For each size, what was taken in each round, by the titles.
    """
    numbers = FirstNumbers(device)

    def measure() -> list[dict[str, list[Sample]]]:
        with (
            use_device(device),
            numbers.restored(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            sizes = make()
            count = sum(len(x.titles) for x in sizes)
            with _bar(count) if progress else nullcontext() as bar:
                return _measured(sizes, see, take, timeout, bar)

    return holding(numbers.locks, measure)


def _measured(
    sizes: Sequence[Sandboxes],
    see: Callable[[int, str, Sandbox], None],
    take: Callable[[Sandbox], Sample],
    timeout: float | None,
    bar: Any,
) -> list[dict[str, list[Sample]]]:
    found: list[dict[str, list[Sample]]] = [{} for _ in sizes]

    def begin(k: int, title: str, sandbox: Sandbox) -> None:
        found[k][title] = []
        see(k, title, sandbox)
        if bar is not None:
            bar.update()

    def add(k: int, title: str, sandbox: Sandbox) -> None:
        found[k][title].append(take(sandbox))
        if bar is not None:
            bar.update()

    if bar is not None and timeout is not None:
        bar.total *= 1 + LEAST
    for k, own in enumerate(sizes):
        own.each(partial(begin, k))
    for count in rounds(timeout):
        if bar is not None:
            bar.total = sum(map(len, found)) * (1 + count)
        for k, own in enumerate(sizes):
            own.each(partial(add, k))
    return found


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm (progress: True); run `pip install tqdm`"
        ) from error
    return tqdm(desc="profile", total=total, unit="layer")


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer on a device and in train mode."""
    copy = deepcopy(layer)
    copy.train()
    place([copy], [device])
    return copy


def leaves(batch: Batch) -> Batch:
    """The same values without what they were computed from."""
    return batch.replace([x.detach().requires_grad_(x.requires_grad) for x in batch])
