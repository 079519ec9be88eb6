"""Sandboxes: copies of layers that run on a device again and again, to be measured there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TypeVar

import torch
from torch import nn

from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.devices.measures import Stopwatch, memory_allocated, memory_free
from torchgpipe.devices.streams import use_device
from torchgpipe.partition.placement import place, tensors
from torchgpipe.planner.progress import Progress
from torchgpipe.planner.rounds import LEAST, repeat
from torchgpipe.planner.storages import LiveStorages
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import Batch

__all__: list[str] = []

Sample = TypeVar("Sample")

#: A time is measured well enough if it is so many times the resolution of the clock.
GRAINS = 100

#: As many calls as make one sample, at most.
MOST = 16


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
        self.batch = batch
        self.device = device
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

    def run() -> list[dict[str, list[Sample]]]:
        sizes = make()
        found: list[dict[str, list[Sample]]] = [{} for _ in sizes]
        count = sum(len(x.titles) for x in sizes)
        total = count * (1 + (0 if timeout is None else LEAST))
        with Progress(progress, "profile", "layer", total) as bar:

            def once(visit: Callable[[int, str, Sandbox], None]) -> None:
                for k, sandboxes in enumerate(sizes):
                    sandboxes.each(partial(visit, k))

            def begin(k: int, title: str, sandbox: Sandbox) -> None:
                found[k][title] = []
                see(k, title, sandbox)
                bar.step()

            def add(k: int, title: str, sandbox: Sandbox) -> None:
                found[k][title].append(take(sandbox))
                bar.step()

            once(begin)
            if timeout is not None:
                repeat(lambda: once(add), timeout, lambda x: bar.expect(count * (1 + x)))
        return found

    def measure() -> list[dict[str, list[Sample]]]:
        with (
            use_device(device),
            numbers.restored(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            return run()

    return holding(numbers.locks, measure)


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
        self.layer = layer
        self.batch = batch
        self.device = device
        self.stopwatch = Stopwatch(device)
        _, self.output = self._run()
        """The input of the next layer."""

    def activations(self) -> int:
        """Run the layer, and return the bytes that its forward leaves behind."""
        batch = self.input()
        before = memory_allocated(self.device)
        if before is not None:
            output = self.forward(batch)
            after = memory_allocated(self.device) or 0
            del output
            # The difference is negative if the garbage collector has freed older tensors.
            return max(0, after - before)
        with LiveStorages() as storages:
            output = self.forward(batch)
        size = sum(storages.sizes())
        del output
        return size

    def sample(self) -> tuple[float, float]:
        """Run the layer, and return the times of its forward and of its backward.

        A layer that takes little more time than the clock can tell runs several times. Each run
        ends before the next one starts, since the activations of several might not fit.
        """
        times = [self._run()[0]]
        while sum(map(sum, times)) < GRAINS * self.stopwatch.resolution and len(times) < MOST:
            times.append(self._run()[0])
        forward, backward = zip(*times)
        return fmean(forward), fmean(backward)

    def _run(self) -> tuple[tuple[float, float], Batch]:
        batch = self.input()
        self.stopwatch.start()
        output = self.forward(batch)
        forward, backward = self.stopwatch.stop(), 0.0
        # Skips that pass by the layer have no backward here.
        parts = [output.parts[key] for key in output.parts if key not in self.batch.skips]
        outputs = [x for x in chain(*parts) if x.requires_grad]
        if outputs:
            gradients = [torch.ones_like(x) for x in outputs]
            self.stopwatch.start()
            torch.autograd.backward(outputs, gradients)
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


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer on a device and in train mode."""
    copy = deepcopy(layer)
    copy.train()
    place([copy], [device])
    return copy


def leaves(batch: Batch) -> Batch:
    """The same values without what they were computed from."""
    return batch.replace([x.detach().requires_grad_(x.requires_grad) for x in batch])
