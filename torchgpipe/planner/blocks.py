"""Blocks of any model: what each takes of time and memory, and those that stay together.

A block is a module that a device map keeps whole: see :mod:`torchgpipe.mapped.device_map`. The
model's own forward runs on a sample, and each of its blocks is measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, cycle
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.body import starts_in_place
from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.mapped.lazy_outputs import can_fill_itself
from torchgpipe.planner.memory import OUTSIDE
from torchgpipe.planner.sandbox import (
    Meter,
    bytes_of,
    kind_of,
    pooled,
    rounds,
    strided,
    verify_timed,
    watching,
)
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []

#: Measures blocks; returns by name what those cost that are called, in the order of the calls.
Measure: TypeAlias = Callable[[dict[str, nn.Module]], dict[str, float]]


def refined(
    measure: Measure, wholes: Wholes, count: int
) -> tuple[dict[str, nn.Module], dict[str, float]]:
    """Measure the blocks of a model, and divide those that would hold up so many devices."""
    blocks = wholes.blocks()
    costs = measure(blocks)
    while (finer := wholes.finer(blocks, costs, count)) is not None:
        blocks, costs = finer, measure(finer)
    return blocks, costs


def timed(
    model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any, timeout: float = 1.0
) -> dict[str, float]:
    """Measure the seconds of each block's forward in a run of the model."""
    home = home_of(model)
    watches = {name: Stopwatch(home_of(block, home)) for name, block in blocks.items()}

    def once() -> dict[str, float]:
        times: dict[str, float] = {}

        def after(name: str, *_: Any) -> None:
            # A run may call a block several times.
            times[name] = times.get(name, 0.0) + watches[name].stop()

        # Hooked anew in each run, which begins with the first name of a block.
        with hooked(blocks, lambda name, *_: watches[name].start(), after):
            model(*args, **kwargs)
        return times

    with unchanged(model), torch.no_grad():
        # The first run is a warm-up.
        once()
        samples = rounds(timeout, once, dict.values)
    # A model may call its blocks in one round and not in another, but the order stays.
    names = [*dict.fromkeys(chain(*samples))]
    kinds = [kind_of(blocks[name]) for name in names]
    times = pooled(kinds, [[sample.get(name, 0.0) for sample in samples] for name in names])
    verify_timed(times, home, "blocks", "move the model to the CPU before, by model.cpu()")
    return dict(zip(names, times))


def home_of(module: nn.Module, otherwise: torch.device = CPU) -> torch.device:
    """The device of a module's first parameter, if it has any."""
    return next((x.device for x in module.parameters()), otherwise)


@contextmanager
def hooked(
    blocks: Mapping[str, nn.Module], before: Callable[..., None], after: Callable[..., None]
) -> Iterator[None]:
    """Call functions with the name of a block before and after its forward.

    The first one gets the block, its arguments, and its keyword arguments, too. A block with
    several names is called under one after another.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, block in blocks.items():
        names.setdefault(block, []).append(name)
    with ExitStack() as hooks:
        for block, block_names in names.items():
            firsts, seconds = cycle(block_names), cycle(block_names)
            for handle in (
                block.register_forward_pre_hook(
                    lambda *call, names=firsts: before(next(names), *call), with_kwargs=True
                ),
                block.register_forward_hook(lambda *call, names=seconds: after(next(names), *call)),
            ):
                hooks.callback(handle.remove)
        yield


class BlockCall(NamedTuple):
    """The bytes that a call of a block takes, and the model's own code after it."""

    #: The name of the block; None for the code in front of the first call.
    block: str | None
    #: Its arguments.
    input: int
    #: What is there after forward of what the call has made, and of what the code has made.
    kept: int
    code: int
    #: The most that either makes at a time.
    most: int


def recorded(
    model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any
) -> list[BlockCall]:
    """Run a model forward on a sample, and see what takes memory.

    The model and random numbers stay as they are.
    """
    # The model may change its arguments in place.
    args, kwargs = map_leaves(cloned, (args, kwargs))
    arguments = strided((args, kwargs))
    meter = Meter([*model.parameters(), *model.buffers(), *arguments])
    labels: list[tuple[str | None, int]] = [(None, 0)]
    depth = 0

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            # A pipeline clones the input of a block that computes in place.
            times = 2 if starts_in_place(block) else 1
            labels.append((name, times * bytes_of((args, kwargs))))
            meter.enter()

    def leave(*_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            meter.enter()

    with (
        unchanged(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        watching(meter.note),
        hooked(blocks, enter, leave),
    ):
        # No call is in front of the first code.
        meter.enter()
        meter.enter()
        output = model(*args, **kwargs)
        has_loss = any(x.requires_grad and not x.dim() for x in Batch(output))
        # Outputs with a loss, as of Transformers, join micro-batches only when they are read.
        is_joined = not (has_loss and can_fill_itself(output))
        size = sum(x.nbytes for x in strided([*Batch(output)]) if x.dim() and is_joined)
        kept = [x.alive() for x in meter.sections]
    # The arguments wait in front of the first call, and the outputs are kept after the last one.
    kept[1] += bytes_of(arguments)
    kept[-1] += size if has_loss else OUTSIDE * size
    most = [x.most for x in meter.sections]
    return [
        BlockCall(name, size, kept[k], kept[k + 1], max(most[k : k + 2]))
        for (name, size), k in zip(labels, count(0, 2))
    ]


def cloned(x: Any) -> Any:
    """A copy of a tensor, which is no leaf, so that it may be changed in place."""
    return x.detach().requires_grad_(x.requires_grad).clone() if isinstance(x, Tensor) else x


@dataclass
class Footprint:
    """The memory of a model, whichever blocks a device has."""

    model: nn.Module
    #: The blocks by name, and what a run of one micro-batch has taken.
    blocks: Mapping[str, nn.Module]
    calls: Sequence[BlockCall]
    #: The number of micro-batches, and how many of them, from the first, are computed again.
    chunks: int
    again: int
    #: The bytes of the optimizer for each byte of a parameter that it changes.
    state: float

    @cached_property
    def weights(self) -> dict[tuple[str | None, ...], tuple[int, int, int]]:
        """The bytes of all weights, of trained ones, and of the largest of these.

        They are by the blocks that have them, where None stands for the model itself.
        """
        users: dict[Tensor, list[str | None]] = {}
        for name, module in self.blocks.items():
            for x in {*module.parameters(), *module.buffers()}:
                users.setdefault(x, []).append(name)
        sizes: dict[tuple[str | None, ...], tuple[int, int, int]] = {}
        for x in (*self.model.parameters(), *self.model.buffers()):
            names = (*users.get(x, [None]),)
            size, trained, largest = sizes.get(names, (0, 0, 0))
            changed = x.nbytes if x.requires_grad else 0
            sizes[names] = size + x.nbytes, trained + changed, max(largest, changed)
        return sizes

    def need(self, blocks: Collection[str | None]) -> float:
        """The most bytes of a device with some blocks, and with None for all else."""
        now, most = 0.0, 0
        for names, (size, trained, largest) in self.weights.items():
            if any(name in blocks for name in names):
                # A weight that blocks share is at home in the first of the deepest ones. Another
                # device gets a copy, and sends the copy's gradient home.
                home = max(names, key=lambda name: 0 if name is None else 1 + name.count("."))
                now += size + trained * (1 + (self.state if home in blocks else 0.0))
                most = max(most, largest)
        here = [x.block in blocks for x in self.calls]
        calls = [x for x, is_here in zip(self.calls, here) if is_here]
        if not calls:
            return now
        # Arguments from another device are copies.
        arriving = sum(
            x.input
            for x, was_here, is_here in zip(self.calls, [False, *here], here)
            if is_here and not was_here
        )
        now += self.chunks * (sum(x.code for x in calls) + arriving)
        # While a cell is computed again, it keeps as much as one that is not.
        full = max(self.chunks - self.again, min(1, self.again))
        now += full * sum(x.kept for x in calls) + self.again * sum(x.input for x in calls)
        # Backward is taken to make as much at a time as forward, and the gradient of one weight.
        return now + max(x.most for x in calls) + 2 * arriving + most
