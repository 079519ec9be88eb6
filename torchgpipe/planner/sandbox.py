"""Sandboxes: copies of layers that run again and again on a device, to be measured there.

A *meter* sees what memory a run makes: what is alive of it, and the most at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from math import isclose
from statistics import median, median_low
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.ambient.generators import generator_of, get_state, set_state
from torchgpipe.autograd.halves import Halves, backward
from torchgpipe.autograd.nodes import enter
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU
from torchgpipe.partition.placement import place, tensors
from torchgpipe.recompute.once import updated_in, updates
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: How many times the noise of their kind the times of layers differ that are alike.
NOISE = 4

#: As few rounds as tell how far a time varies.
LEAST = 3


def rounds(
    timeout: float | None, take: Callable[[], Any], times_in: Callable[[Any], Iterable[float]]
) -> list[Any]:
    """Take times for some seconds, and :data:`LEAST` times at least; not at all without seconds.

    If all times are equal in so many rounds, as on a simulated clock, more would tell nothing.
    """
    start, samples = monotonic(), list[Any]()
    while timeout is not None and (len(samples) < LEAST or monotonic() - start < timeout):
        samples.append(take())
        if len(samples) == LEAST and all(
            # A simulated clock rounds its sums, by far less than a real clock can tell.
            isclose(min(x), max(x), rel_tol=1e-9, abs_tol=1e-12)
            for x in zip(*map(times_in, samples))
        ):
            break
    return samples


def undisturbed(times: Sequence[float]) -> float:
    """The time that something takes undisturbed: the lower quartile of its times over rounds.

    Noise only adds time. The minimum would be nearer to the truth for work that is the same each
    time, but a layer may skip its work at random, as with stochastic depth.
    """
    return sorted(times)[(len(times) - 1) // 4]


def verify_timed(times: Sequence[float], device: object, what: str, elsewhere: str) -> None:
    """Check that anything takes time, before it is balanced by it."""
    if not any(times):
        raise ValueError(
            f"{what} must take time to be balanced by it, and on virtual accelerators only what "
            f"has a cost does (device: {device}, times: 0 for all {len(times)} {what}); measure "
            "within torchgpipe.testing.observe(costs='measured'), or with costs of what they call, "
            f"as in costs={{'addmm': 1.0}}, or {elsewhere}"
        )


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """The class of a module and its parameters' sizes, by which layers or blocks are alike."""
    sizes = [(x.shape, x.dtype, x.requires_grad) for x in module.parameters()]
    # Modules without parameters may do different work, so each of them is a kind of its own.
    return (type(module), *sizes) if sizes else (module,)


def pooled(kinds: Sequence[Hashable], samples: Sequence[Sequence[float]]) -> list[float]:
    """The undisturbed time of each layer, one for those that nobody can tell apart.

    Equal blocks are the rule in large models, and the middle of several measurements is surer than
    each. But a kind is only what can be seen from outside. So a layer keeps its own time if that is
    far from the middle one of its kind.
    """
    times, groups = [*map(undisturbed, samples)], dict[Hashable, list[int]]()
    for k, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(k)
    result = [*times]
    for group in groups.values():
        # The lower median is the time of one of the layers, and a mean of two might be of none.
        middle = median_low(times[k] for k in group)
        noise = NOISE * median(median(samples[k]) - times[k] for k in group)
        near = [k for k in group if abs(times[k] - middle) <= noise]
        for k in near:
            result[k] = median(times[k] for k in near)
    return result


class Figures(NamedTuple):
    """The milliseconds and the bytes that a layer takes for a micro-batch."""

    #: The times of F and B, and of the halves of B, I and W. One after the other these may take
    #: longer than B, since a node of autograd may compute both gradients each time.
    forward: float = 0
    backward: float = 0
    input: float = 0
    weight: float = 0
    #: The time of a recomputation, which ends at the last tensor that the layer saves, if it is the
    #: last layer of a partition.
    again: float = 0
    #: The bytes of its output, and of the gradient of the output; skips aside.
    output: float = 0
    gradient: float = 0
    #: The bytes that F has made and that are there after it, the output included.
    left: float = 0
    #: The bytes of these, and of the input, that backward needs; and ``pending``, the bytes made by
    #: F and I that are there between I and W.
    kept: float = 0
    kept_input: float = 0
    pending: float = 0
    #: The most bytes made at a time, in F, in I (with the gradients of the output) and in W.
    most_forward: float = 0
    most_input: float = 0
    most_weight: float = 0


class Sandbox:
    """A layer that runs on one input, again and again.

    The first run is a warm-up: it may allocate memory that stays, such as the workspace of a
    library, or compile the layer. With the input come all skips that were stashed and not popped.
    """

    def __init__(self, layer: nn.Module, batch: Batch, device: torch.device) -> None:
        self.layer, self.batch = layer, batch
        self._watch = Stopwatch(device)
        #: The input of the next layer.
        self.output = batch
        self.sample()

    @property
    def popped(self) -> list[Any]:
        """The keys of the skips that the layer pops."""
        return [x for x in self.batch.skips if x not in self.output.skips]

    def sample(self) -> tuple[float, float]:
        """Run the layer, and return the seconds of its forward and of its backward."""
        batch, ends = self._input()
        self._watch.start()
        output = self._forward(batch)
        forward, roots = self._watch.stop(), self._roots(output)
        self.output = leaves(output)
        grads = [torch.ones_like(x) for x in roots]
        self._watch.start()
        trained = [x for x in self.layer.parameters() if x.requires_grad]
        backward([*map(get_gradient_edge, roots)], grads, [*ends, *trained])
        return forward, self._watch.stop() if roots else 0.0

    def halved(self, *, is_metered: bool) -> Figures:
        """Run the layer, its backward in halves, for its memory or for its times in seconds."""
        state = [x for _, x in tensors(self.layer)]
        trained = [x for x in self.layer.parameters() if x.requires_grad]
        weights, again = memories(state), 0.0

        def pack(x: Tensor) -> Tensor:
            nonlocal again
            if x.layout == torch.strided and StorageWeakRef(x.untyped_storage()) not in weights:
                again = self._watch.stop()
            return x.detach()

        # These hooks would hold saved tensors that the first half lets go of.
        hooks = nullcontext() if is_metered else saved_tensors_hooks(pack, lambda x: x)
        meter = Meter([*state, *self.batch])
        with watching(meter.note) if is_metered else nullcontext():
            arrived = meter.enter()
            batch, ends = self._input()
            made = meter.enter()
            with hooks:
                self._watch.start()
                output = self._forward(batch)
            value, roots, left = strided(output.parts[VALUE]), self._roots(output), made.alive()
            size, gradient = bytes_of(value), sum(x.nbytes for x in value if x.requires_grad)
            first = meter.enter()
            grads, edges = [torch.ones_like(x) for x in roots], [*map(get_gradient_edge, roots)]
            halves = Halves(edges, grads, ends, trained)
            del batch, output, value, roots, grads
            kept = made.alive(), arrived.alive()
            self._watch.start()
            halves.input()
            input, pending = self._watch.stop(), made.alive() + first.alive()
            second = meter.enter()
            self._watch.start()
            halves.weight()
            weight = self._watch.stop()
        if not is_metered:
            return Figures(input=input if ends else 0.0, weight=weight, again=again)
        most = [x.most for x in (made, first, second)]
        sizes = map(float, (size, gradient, left, *kept, pending, *most))
        return Figures(0.0, 0.0, 0.0, 0.0, 0.0, *sizes)

    def timed(self, memory: Figures) -> Figures:
        """Run the layer twice, once with its backward in halves; add the times to its memory."""
        halves = self.halved(is_metered=False)
        forward, backward = self.sample()
        input, again = min(halves.input, backward), min(halves.again, forward)
        times = forward, backward, input, halves.weight, again
        return Figures(*[1000 * x for x in times], *memory[len(times) :])

    def _input(self) -> tuple[Batch, list[Any]]:
        """A copy of the input at the beginning of a graph, and the ends of its backward."""
        batch = self.batch.replace([x.clone() for x in leaves(self.batch)])
        parts = [batch.parts[key] for key in (VALUE, *self.popped)]
        entries = [x for x in chain(*parts) if x.requires_grad]
        entered, ends = enter(*entries) if entries else ((), [])
        begun = dict(zip(map(id, entries), entered))
        return batch.replace([begun.get(id(x), x) for x in batch]), ends

    def _forward(self, batch: Batch) -> Batch:
        """Run the layer; the output has the skips, too."""
        tracker = SkipTracker.of(batch)
        with use_skip_tracker(tracker), updates(updated_in(self.layer)):
            return batch.call(self.layer).with_skips(tracker.parts())

    def _roots(self, output: Batch) -> list[Tensor]:
        """The outputs that backward begins with; skips that pass by the layer have none here."""
        parts = [part for key, part in output.parts.items() if key not in self.batch.skips]
        return [x for x in chain(*parts) if x.requires_grad]


@contextmanager
def same_numbers(device: torch.device) -> Iterator[None]:
    """Have the caller draw the same random numbers after the block as without it."""
    states = {x: get_state(x) for x in {generator_of(device), CPU}}
    try:
        yield
    finally:
        for generator, state in states.items():
            set_state(generator, state)


def progress_bar(is_shown: bool, total: int) -> Any:
    """Context manager for a progress bar, or for nothing that looks like one."""
    if not is_shown:
        return nullcontext(SimpleNamespace(update=lambda: None))
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm (progress: True); run `pip install tqdm`"
        ) from error
    return tqdm(desc="profile", unit="layer", total=total)


def copied(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer on a device and in train mode."""
    copy = deepcopy(layer)
    copy.train()
    place([copy], [device])
    return copy


def leaves(batch: Batch) -> Batch:
    """The same values without what they were computed from."""
    return batch.replace([x.detach().requires_grad_(x.requires_grad) for x in batch])


@dataclass
class Section:
    """A part of a run, such as the call of a block, or forward or backward."""

    #: The bytes of each memory that it has made, as long as somebody holds it.
    made: dict[StorageWeakRef, int] = field(default_factory=dict)
    #: The most bytes of these at a time.
    most: int = 0

    def alive(self) -> int:
        """The bytes of what it has made, and somebody holds."""
        self.made = {x: size for x, size in self.made.items() if not x.expired()}
        return sum(self.made.values())


class Meter:
    """The memory that one run makes, within ``watching(meter.note)``, section by section.

    What operators make counts, not what they use inside, nor the memory of ``known`` tensors, such
    as weights.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        #: The memory that is known, or that a section has made.
        self._seen = {*memories(known)}
        self.sections: list[Section] = []

    def enter(self) -> Section:
        """Begin another section."""
        self.sections.append(Section())
        return self.sections[-1]

    def note(self, _: Any, output: Any) -> None:
        """Take note of what an operator has made."""
        made = {x: size for x, size in memories(output).items() if x not in self._seen}
        self._seen.update(made)
        # Memory that is made before the first section, as by copies of arguments, does not count.
        if made and self.sections:
            section = self.sections[-1]
            section.made.update(made)
            section.most = max(section.most, section.alive())


def memories(values: Any) -> dict[StorageWeakRef, int]:
    """The memory of all tensors among values, which nobody holds by this, and its bytes."""
    storages = [x.untyped_storage() for x in strided(values)]
    return {StorageWeakRef(x): x.nbytes() for x in storages}


def bytes_of(values: Any) -> int:
    """The bytes of the memory of all tensors among values."""
    return sum(memories(values).values())


def strided(values: Any) -> list[Tensor]:
    """The tensors among values that have memory of their own, as sparse ones have not."""
    tensors = [x for x in leaves_of(values) if isinstance(x, Tensor)]
    return [x for x in tensors if x.layout == torch.strided]


def watching(note: Callable[[Any, Any], None]) -> Any:
    """Context manager that calls a function with the inputs and the output of each operator.

    Operators of backward are among them, wherever it runs in a thread of the block.
    """
    return _mode()(note)


# Made once, since only Python's collector frees a class.
@cache
def _mode() -> Any:
    # To mypy, PyTorch's class is any object.
    class AllocationMode(_torch.DispatchMode):  # type: ignore[misc]
        def __init__(self, note: Callable[[Any, Any], None]) -> None:
            super().__init__()
            self._note = note

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            self._note((args, kwargs), output)
            return output

    return AllocationMode
