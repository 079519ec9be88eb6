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
from torch.autograd.graph import get_gradient_edge

from torchgpipe.autograd.nodes import next_number
from torchgpipe.devices.recorder import Stopwatch
from torchgpipe.devices.streams import CPU, has_streams, use_device
from torchgpipe.engine.body import starts_in_place
from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.mapped.on_demand import can_fill_itself
from torchgpipe.planner.memory_tracker import Run, memory_of, size_of, strided
from torchgpipe.planner.record import GIVEN, Record, Section, Value
from torchgpipe.planner.sandbox import copied, pooled, rounds, spread, undisturbed, verify_timed
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


class Times(NamedTuple):
    """The blocks of a model, the seconds of their forwards, and how far these may be off.

    They are by name, costs in the order of the calls. A block that is not called is left out.
    """

    blocks: dict[str, nn.Module]
    costs: dict[str, float]
    spreads: dict[str, float]


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
    taken: list[dict[str, float]] = []

    def before(name: str, *_: Any) -> None:
        watches[name].start()

    def after(name: str, *_: Any) -> None:
        taken[-1][name] = taken[-1].get(name, 0.0) + watches[name].stop()

    def once() -> None:
        taken.append({})
        with hooked(blocks, before, after):
            model(*args, **kwargs)

    def samples() -> dict[str, list[float]]:
        # A model may call its blocks in one round and not in another, but the order stays.
        names = dict.fromkeys(name for found in taken for name in found)
        return {name: [found.get(name, 0.0) for found in taken] for name in names}

    with unchanged(model), torch.no_grad():
        once()
        taken.clear()
        for _ in rounds(timeout, lambda: samples().values()):
            once()
    names, each = [*samples()], [*samples().values()]
    kinds = [kind_of(blocks[name]) for name in names]
    times, noise = pooled(kinds, [*map(undisturbed, each)], [*map(spread, each)])
    verify_timed(times, home, "blocks", "move the model to the CPU before, by model.cpu()")
    return Times({**blocks}, dict(zip(names, times)), dict(zip(names, noise)))


def kind_of(block: nn.Module) -> tuple[object, ...]:
    """The class of a block and the sizes of its parameters, by which blocks are alike."""
    sizes = [(x.shape, x.dtype) for x in block.parameters()]
    # Without parameters nothing tells how much there is to do.
    return (type(block), *sizes) if sizes else (block,)


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
        for block, own in names.items():
            firsts, seconds = cycle(own), cycle(own)
            handles += [
                block.register_forward_pre_hook(
                    lambda *given, names=firsts: before(next(names), *given), with_kwargs=True
                ),
                block.register_forward_hook(
                    lambda *given, names=seconds: after(next(names), *given)
                ),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()


def recorded(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    args: Any,
    kwargs: Any,
    device: torch.device = CPU,
) -> Record:
    """Run a model forward and backward on a sample, and see what takes memory.

    The model, its gradients and random numbers stay as they are. The CPU's kernels keep other
    memory than those of accelerators. So if the model is on the CPU, and will be on an accelerator,
    a copy of one block of each kind runs there, too.
    """
    run = ModelRun(model, blocks)
    # The model may change its arguments in place.
    found = run.record(*map_leaves(cloned, (args, kwargs)))
    if not has_streams(device):
        return found
    there: dict[object, Section | None] = {}
    for k, section in enumerate(found.sections):
        if section.block is None or not section.is_call:
            continue
        block, kind = blocks[section.block], run.kinds[k]
        if next((x.device for x in chain(block.parameters(), model.parameters())), CPU) == CPU:
            # Blocks that look alike may be frozen, or have settings that do less.
            key = kind, section.kept, section.forward, section.free
            if key not in there:
                there[key] = _on(device, block, *run.arguments[kind])
            other = there[key]
            if other is not None:
                section.kept, section.pieces = other.kept, other.pieces
                section.forward = other.forward
                section.free, section.held = other.free, other.held
    return found


class ModelRun(Run):
    """The memory of one run of a model: of the calls of its blocks, and of the code after each."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
        super().__init__(model, [Section(None, False, next_number())])
        self.calls, self._model, self._blocks = 0, model, blocks
        #: The kind of each section that is a call, and the arguments of the first one of a kind.
        self.kinds: dict[int, object] = {}
        self.arguments: dict[object, tuple[Any, Any]] = {}

    def record(self, args: Any, kwargs: Any) -> Record:
        """Run the model forward and backward."""
        given = strided((args, kwargs))
        size = sum({memory_of(x): size_of(x) for x in given}.values())
        weights = [x for x in self._model.parameters() if x.requires_grad]
        ends = [get_gradient_edge(x) for x in given if x.requires_grad]
        with self._running():
            outputs, fills_itself = self._forward(args, kwargs)
            roots = [x for x in outputs if x.requires_grad]
            losses = [x for x in roots if not x.dim()]
            shared = {*map(self._give_back, strided(outputs))}
            self.settle(shared | {id(x.value) for x in self.pieces.values() if x.is_used})
            root = self.turn(losses or roots)
            del outputs, roots
            self.backward(root, weights, ends)
        values = [x.value for x in self.pieces.values() if x.is_used]
        return Record(self.sections, values, size, bool(losses), fills_itself)

    def kept(self, args: Any, kwargs: Any) -> dict[str, float]:
        """Run the model forward, and see what the calls of each block keep for backward.

        What several keep counts for the first of them.
        """
        with self._running():
            # The output holds what was saved.
            output = self._forward(args, kwargs)
            self.settle({id(x.value) for x in self.pieces.values() if x.is_used})
            del output
        names = {k: str(x.block) for k, x in enumerate(self.sections) if x.is_call}
        found = dict.fromkeys(names.values(), 0.0)
        for k, name in names.items():
            found[name] += self.sections[k].kept
        for x in self.pieces.values():
            savers = x.value.savers & names.keys()
            if x.is_used and savers:
                found[names[min(savers)]] += x.size
        return found

    @contextmanager
    def _running(self) -> Iterator[None]:
        with (
            unchanged(self._model),
            torch.inference_mode(False),
            torch.enable_grad(),
            self.watching(),
        ):
            yield

    def _forward(self, args: Any, kwargs: Any) -> tuple[list[Tensor], bool]:
        """Run the model, and return what it returns, and whether that fills itself."""
        for x in strided((args, kwargs)):
            self.give(Value(GIVEN, size_of(x)), x)
        with hooked(self._blocks, self._enter, self._leave), self.saving:
            output = self._model(*args, **kwargs)
            found = [*Batch(output)], can_fill_itself(output)
            del output
        self.begin(Section(None, False, next_number()))
        self.sections.pop()
        # From here on no section uses anything.
        self.calls += 1
        return found

    def _give_back(self, x: Tensor) -> int:
        """Take note that the caller gets a tensor; the identity of its value."""
        piece = self.pieces.get(memory_of(x))
        if piece is not None:
            piece.value.give(x)
        return id(piece and piece.value)

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            return
        self.begin(Section(name, True, next_number()))
        self.use((args, kwargs))
        tensors = strided((args, kwargs))
        self.sections[-1].clones = starts_in_place(block) * sum(x.nbytes for x in tensors)
        sizes = [(x.shape, x.dtype, x.requires_grad) for x in tensors]
        kind = kind_of(block), *sizes
        self.kinds[len(self.sections) - 1] = kind
        self.arguments.setdefault(kind, map_leaves(_detached, (args, kwargs)))

    def _leave(self, name: str, *_: Any) -> None:
        self.calls -= 1
        if not self.calls:
            self.begin(Section(name, False, next_number()))


def _on(device: torch.device, block: nn.Module, args: Any, kwargs: Any) -> Section | None:
    """Record the call of a copy of a block on a device; None if the device is too small for it."""

    def brought(x: Any) -> Any:
        return cloned(x.to(device)) if isinstance(x, Tensor) else x

    with use_device(device), torch.inference_mode(False), torch.enable_grad():
        try:
            copy = copied(block, device)
            args, kwargs = map_leaves(brought, (args, kwargs))
            return ModelRun(copy, {"": copy}).record(args, kwargs).sections[1]
        except torch.OutOfMemoryError:
            return None


def cloned(x: Any) -> Any:
    """A copy of a tensor, which is no leaf, so that it may be changed in place."""
    return _detached(x).clone() if isinstance(x, Tensor) else x


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
