"""Blocks of any model: what each takes of time and memory, and those that stay together.

A block is a module that a device map keeps whole: see :mod:`torchgpipe.mapped.device_map`. The
model's own forward runs on a sample, and each of its blocks is measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU
from torchgpipe.engine.body import starts_in_place
from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.mapped.lazy_outputs import can_fill_itself
from torchgpipe.planner.meter import Meter, Section, bytes_of, strided, watching
from torchgpipe.planner.sandbox import kind_of, pooled, rounds, verify_timed
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


class Times(NamedTuple):
    """The blocks of a model, and the seconds of their forwards, in the order of the calls.

    A block that is not called has no time.
    """

    blocks: dict[str, nn.Module]
    costs: dict[str, float]


def refined(measure: Callable[[dict[str, nn.Module]], Times], wholes: Wholes, count: int) -> Times:
    """Measure the blocks of a model, and divide those that would hold up so many devices."""
    times = measure(wholes.blocks())
    while (finer := wholes.finer(times.blocks, times.costs, count)) is not None:
        times = measure(finer)
    return times


def timed(
    model: nn.Module,
    *args: Any,
    blocks: Mapping[str, nn.Module],
    timeout: float = 1.0,
    **kwargs: Any,
) -> Times:
    """Measure the time that each block takes, as :func:`map_by_time` says."""
    home = next((x.device for x in model.parameters()), CPU)
    watches = {
        name: Stopwatch(next((x.device for x in block.parameters()), home))
        for name, block in blocks.items()
    }
    #: For each round, how long each block took; a block may be called several times.
    samples: list[dict[str, float]] = []

    def before(name: str, *_: Any) -> None:
        watches[name].start()

    def after(name: str, *_: Any) -> None:
        samples[-1][name] = samples[-1].get(name, 0.0) + watches[name].stop()

    with unchanged(model), torch.no_grad(), hooked(blocks, before, after):
        # The first run is a warm-up.
        for _ in chain([None], rounds(timeout)):
            samples.append({})
            model(*args, **kwargs)
    # A model may call its blocks in one round and not in another, but the order stays.
    names = [*dict.fromkeys(name for sample in samples[1:] for name in sample)]
    times = pooled(
        [kind_of(blocks[name]) for name in names],
        [[sample.get(name, 0.0) for sample in samples[1:]] for name in names],
    )
    verify_timed(times, home, "blocks", "move the model to the CPU before, by model.cpu()")
    return Times({**blocks}, dict(zip(names, times)))


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
    handles = []
    try:
        for block, own_names in names.items():
            firsts, seconds = cycle(own_names), cycle(own_names)
            handles += [
                block.register_forward_pre_hook(
                    lambda *call, names=firsts: before(next(names), *call), with_kwargs=True
                ),
                block.register_forward_hook(lambda *call, names=seconds: after(next(names), *call)),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


class Run(NamedTuple):
    """The memory of one run of a model."""

    parts: list[Section]
    #: The bytes of the arguments, and of the outputs that come back as they are.
    input: int
    output: int
    has_loss: bool


def recorded(model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any) -> Run:
    """Run a model forward on a sample, and see what takes memory.

    The model and random numbers stay as they are.
    """
    # The model may change its arguments in place.
    args, kwargs = map_leaves(cloned, (args, kwargs))
    arguments = strided((args, kwargs))
    meter = Meter([*model.parameters(), *model.buffers(), *arguments])
    depth = 0

    def enter(name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            # A pipeline clones the input of a block that computes in place.
            times = 2 if starts_in_place(block) else 1
            meter.enter(name, True, times * bytes_of((args, kwargs)))

    def leave(name: str, *_: Any) -> None:
        nonlocal depth
        depth -= 1
        if not depth:
            meter.enter(name)

    with (
        unchanged(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        watching(meter.note),
        hooked(blocks, enter, leave),
    ):
        meter.enter()
        output = model(*args, **kwargs)
        has_loss = any(x.requires_grad and not x.dim() for x in Batch(output))
        # Outputs with a loss, as of Transformers, join micro-batches only when they are read.
        is_joined = not (has_loss and can_fill_itself(output))
        size = sum(x.nbytes for x in strided([*Batch(output)]) if x.dim() and is_joined)
        for section in meter.sections:
            section.alive()
    return Run(meter.sections, bytes_of(arguments), size, has_loss)


def cloned(x: Any) -> Any:
    """A copy of a tensor, which is no leaf, so that it may be changed in place."""
    return x.detach().requires_grad_(x.requires_grad).clone() if isinstance(x, Tensor) else x
