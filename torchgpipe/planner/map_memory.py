"""The most memory that a device needs in a step of a model under a device map.

The host issues the forwards of all micro-batches first, and then their backwards, the last one
first. Each visit of the device is a partition, and what is in between is on another device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from torchgpipe.autograd.nodes import next_number
from torchgpipe.devices.streams import CPU, has_streams, use_device
from torchgpipe.mapped.on_demand import can_fill_itself
from torchgpipe.planner.blocks import hooked, kind_of, unchanged
from torchgpipe.planner.memory import Issued, LossMemory, peaks
from torchgpipe.planner.memory_tracker import Run, memory_of, size_of, strided
from torchgpipe.planner.record import GIVEN, Record, Section, Value
from torchgpipe.planner.sandbox import copied
from torchgpipe.planner.stage_memory import Stage, Weights
from torchgpipe.values import trees
from torchgpipe.values.microbatch import Batch

__all__ = ["Footprint", "recorded"]


#: A cross entropy: logarithms, and two gradients at a time, of which one stays.
LOSS = LossMemory(3, 1)


@dataclass(frozen=True)
class Footprint:
    """The memory of a model, whichever blocks a device has.

    Args:
        found: the record of the model, for one micro-batch.
        weights: the weights of each block; under None those that belong to no block.
        chunks: the number of micro-batches.
        again: how many of them, from the first, are computed again.
        state: memory of the optimizer, for each byte of a parameter that it changes.
    """

    found: Record
    weights: Mapping[str | None, Weights]
    chunks: int
    again: int
    state: float

    @cached_property
    def _own(self) -> dict[str | None, list[int]]:
        """The numbers of the sections of each block."""
        found: dict[str | None, list[int]] = {}
        for k, section in enumerate(self.found.sections):
            found.setdefault(section.block, []).append(k)
        return found

    @cached_property
    def _each(self) -> list[Weights]:
        """The weights of each section: those of a block are with its first one."""
        firsts = {own[0]: block for block, own in self._own.items()}
        nothing = Weights()
        return [
            self.weights.get(firsts[k], nothing) if k in firsts else nothing
            for k in range(len(self.found.sections))
        ]

    @cached_property
    def _stage(self) -> Callable[[range], Stage]:
        found = self.found
        if found.has_loss and found.fills_itself and self.again == self.chunks:
            # What the model returns beside its loss is not there.
            found = replace(found, values=[replace(x, output=0) for x in found.values])
        return cache(lambda own: Stage(found, self._each, own, by_call=True))

    def peak(self, blocks: Collection[str | None]) -> float:
        """Find the most bytes of a device that has some blocks.

        Args:
            blocks: their names, with None for the first device, which has all else.
        """
        own = sorted(k for x in blocks for k in self._own.get(x, ()))
        stages, placement = [], []
        after = 0
        for visit in _runs(own):
            if visit[0] > after:
                stages.append(self._stage(range(after, visit[0])))
                placement.append(1 + len(stages))
            stages.append(self._stage(visit))
            placement.append(0)
            after = visit[-1] + 1
        if after < len(self.found.sections):
            stages.append(self._stage(range(after, len(self.found.sections))))
            placement.append(1 + len(stages))
        # Blocks that are not called have weights all the same.
        idle = [self.weights[x] for x in blocks if x not in self._own and x in self.weights]
        return (
            sum(x.all + self.state * x.trainable for x in idle)
            + peaks(
                self._order(placement),
                placement,
                stages,
                state=self.state,
                given=self.chunks * self.found.given,
                is_summed=False,
                loss=LossMemory(0, 0) if self.found.has_loss else LOSS,
            )[0]
        )

    def _order(self, placement: Sequence[int]) -> Issued:
        """The order of the host, of whose threads each takes the backward that was recorded last.

        Autograd has a thread for each device, and one with little to do gets ahead. That changes
        peaks by less than 1 %, so it is not counted.
        """
        places = [*enumerate(placement)]
        order = [(w, j, "F", i) for i in range(self.chunks) for j, w in places]
        for i in reversed(range(self.chunks)):
            for j, w in reversed(places):
                order += [(w, j, kind, i) for kind in ("RB" if i < self.again else "B")]
        again = frozenset((j, i) for j, _ in places for i in range(self.again))
        return Issued(order, again, self.chunks)


def _runs(numbers: Sequence[int]) -> list[range]:
    """The runs of numbers that follow each other."""
    found: list[range] = []
    for k in numbers:
        if found and found[-1].stop == k:
            found[-1] = range(found[-1].start, k + 1)
        else:
            found.append(range(k, k + 1))
    return found


def weights_of(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    own: Collection[str | None] | None = None,
) -> dict[str | None, Weights]:
    """The memory of the weights of each block, and under None of what belongs to none.

    A weight that several blocks share counts for the last one of them, the first in backward. Of
    the blocks of one device, a weight whose home is another device comes as a copy, whose gradient
    leaves.
    """
    users: dict[Tensor, list[str | None]] = {}
    for name, module in (*blocks.items(), (None, model)):
        for x in {*module.parameters(), *module.buffers()}:
            users.setdefault(x, []).append(name)
    found: dict[str | None, Weights] = {}
    for x, names in users.items():
        # The home is the first of the deepest ones.
        home = max(names, key=lambda name: 0 if name is None else 1 + name.count("."))
        here = [name for name in names[:-1] if own is None or name in own]
        last, changed = here[-1] if here else None, x.nbytes if x.requires_grad else 0
        before = found.get(last, Weights())
        if own is None or home in own:
            found[last] = Weights(before.all + x.nbytes, before.trainable + changed)
        elif here:
            found[last] = Weights(before.all + x.nbytes + changed, before.trainable)
    return found


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
    found = run.record(*trees.map_leaves(cloned, (args, kwargs)))
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
                section.kept, section.forward = other.kept, other.forward
                section.free, section.held = other.free, other.held
    return found


class ModelRun(Run):
    """The memory of one run of a model: of the calls of its blocks, and of the code after each.

    Args:
        model: the model.
        blocks: the blocks by name.
    """

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
        sizes = [(x.shape, x.dtype, x.requires_grad) for x in strided((args, kwargs))]
        kind = kind_of(block), *sizes
        self.kinds[len(self.sections) - 1] = kind
        self.arguments.setdefault(kind, trees.map_leaves(_detached, (args, kwargs)))

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
            args, kwargs = trees.map_leaves(brought, (args, kwargs))
            return ModelRun(copy, {"": copy}).record(args, kwargs).sections[1]
        except torch.OutOfMemoryError:
            return None


def cloned(x: Any) -> Any:
    """A copy of a tensor, which is no leaf, so that it may be changed in place."""
    return x.detach().requires_grad_(x.requires_grad).clone() if isinstance(x, Tensor) else x


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
