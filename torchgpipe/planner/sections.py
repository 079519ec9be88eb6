"""Sections of a model: what each of its blocks takes of memory, in one forward and backward.

The model runs once, where it is. A section is a call of a block, or the code behind it up to the
next call. Operators tell which memory they make, and in backward the number of a node of autograd
tells which section the node belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.autograd.sequence import next_number, number_of
from torchgpipe.balance.device_map import hooked, kind_of, unchanged
from torchgpipe.balance.sandbox import copied
from torchgpipe.balance.storages import watching
from torchgpipe.devices.streams import CPU, has_streams, use_device
from torchgpipe.mapped.on_demand import can_fill_itself
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.backward import Root
from torchgpipe.values import trees
from torchgpipe.values.microbatch import Batch

__all__ = ["Section", "Sections", "Value", "recorded"]

#: The section of what the caller gives to the model.
GIVEN = -1


@dataclass
class Section:
    """A call of a block, or the code behind it.

    Args:
        block: the name of the block; None in front of the first one.
        is_call: whether it is the call of the block, which can be computed again.
        first: the number of its first node of autograd.
        nodes: how many nodes it has.
        kept: the bytes that it keeps for backward, values aside.
        forward: the most bytes of what it makes at a time.
        alone: the most bytes during its backward: of what it has kept, and of all gradients that it
            makes or uses up.
        adding: likewise where gradients of weights are added to others at once.
    """

    block: str | None
    is_call: bool
    first: int
    nodes: int = 0
    kept: int = 0
    forward: int = 0
    alone: int = 0
    adding: int = 0


@dataclass(eq=False)
class Value:
    """Memory that one section makes, and others use or keep, or the caller gets.

    Args:
        made: the number of the section that makes it, or :data:`GIVEN`.
        size: its bytes.
        users: for each other section that uses it, the bytes of what it uses.
        savers: the sections that keep it for backward.
        gradient: the bytes of its gradient.
        output: the bytes of the tensors in it that the model returns.
    """

    made: int
    size: int
    users: dict[int, int] = field(default_factory=dict)
    savers: set[int] = field(default_factory=set)
    gradient: int = 0
    output: int = 0

    def use(self, section: int, tensor: Tensor) -> None:
        """Take note that a section uses a tensor in this memory."""
        self.users[section] = max(self.users.get(section, 0), tensor.nbytes)
        if tensor.requires_grad:
            self.gradient = max(self.gradient, tensor.nbytes)


@dataclass(frozen=True)
class Sections:
    """The sections of a model and what they share, for one micro-batch.

    Args:
        sections: the sections, in their order.
        values: what several of them use.
        given: the bytes that the caller gives.
        has_loss: whether the model returns a loss.
        fills_itself: whether an output is of a kind that is computed when somebody looks at it.
    """

    sections: Sequence[Section]
    values: Sequence[Value]
    given: int
    has_loss: bool
    fills_itself: bool = False


def recorded(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    args: Any,
    kwargs: Any,
    device: torch.device = CPU,
) -> Sections:
    """Run a model forward and backward on a sample, and see what takes memory.

    The model, its gradients and random numbers stay as they are.

    Args:
        model: the model.
        blocks: its blocks by name.
        args: the arguments of a call.
        kwargs: likewise.
        device: an accelerator that the model will be on. The CPU's kernels keep other memory than
            those of accelerators. So if the model is on the CPU, a copy of one block of each kind
            runs there, too.
    """
    recorder = Recorder(model)
    # The model may change its arguments in place.
    found = recorder.record(model, blocks, *trees.map_leaves(_cloned, (args, kwargs)))
    if not has_streams(device):
        return found
    there: dict[object, Section | None] = {}
    for k, section in enumerate(found.sections):
        if section.block is None or not section.is_call:
            continue
        block, kind = blocks[section.block], recorder.kinds[k]
        if next((x.device for x in chain(block.parameters(), model.parameters())), CPU) == CPU:
            # Blocks that look alike may be frozen, or have settings that do less.
            key = kind, section.kept, section.forward, section.alone, section.adding
            if key not in there:
                there[key] = _on(device, block, *recorder.calls[kind])
            other = there[key]
            if other is not None:
                section.kept, section.forward = other.kept, other.forward
                section.alone, section.adding = other.alone, other.adding
    return found


def _on(device: torch.device, block: nn.Module, args: Any, kwargs: Any) -> Section | None:
    """Record the call of a copy of a block on a device; None if the device is too small for it."""

    def brought(x: Any) -> Any:
        return _cloned(x.to(device)) if isinstance(x, Tensor) else x

    with use_device(device), torch.inference_mode(False), torch.enable_grad():
        try:
            copy = copied(block, device)
            args, kwargs = trees.map_leaves(brought, (args, kwargs))
            recorder = Recorder(copy)
            recorder.record(copy, {"": copy}, args, kwargs)
        except torch.OutOfMemoryError:
            return None
    return recorder.sections[1]


class Piece:
    """Memory, from the operator that makes it until nobody holds it.

    Args:
        value: its sizes and users.
        tensor: a tensor in it.
        born: the number of the operator.
    """

    def __init__(self, value: Value, tensor: Tensor, born: int = 0) -> None:
        self.value, self.born = value, born
        self.reference = _memory(tensor)
        #: The number of the first operator that finds it gone.
        self.gone: int | None = None

    @property
    def lives(self) -> bool:
        """Whether somebody holds it."""
        return not self.reference.expired()


class Recorder:
    """The record of one run.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._weights = {_memory(x) for _, x in tensors(model) if x.layout == torch.strided}
        self.sections = [Section(None, False, next_number())]
        #: All memory but that of weights.
        self._pieces: dict[StorageWeakRef, Piece] = {}
        #: What each section has made that its backward may free.
        self._kept: dict[int, list[Piece]] = {}
        #: The pieces that may go: in forward those of the current section, and in backward all.
        self._live: list[Piece] = []
        self._calls = 0
        #: The kind of each section that is a call, and the arguments of the first one of a kind.
        self.kinds: dict[int, object] = {}
        self.calls: dict[object, tuple[Any, Any]] = {}
        #: The memory of the gradients of weights.
        self._grads: set[StorageWeakRef] = set()
        #: The section of each operator of backward; None in forward.
        self._ticks: list[int] | None = None

    def record(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any
    ) -> Sections:
        """Run the model forward and backward."""
        with unchanged(model), torch.inference_mode(False), torch.enable_grad():
            return self._run(model, blocks, args, kwargs)

    def _run(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any
    ) -> Sections:
        for x in _strided((args, kwargs)):
            self._pieces.setdefault(_memory(x), Piece(Value(GIVEN, _size(x)), x))
        given = sum(x.value.size for x in self._pieces.values())
        weights = [x for x in model.parameters() if x.requires_grad]
        inputs = [x for x in _strided((args, kwargs)) if x.requires_grad]
        with watching(self._note):
            with (
                hooked(blocks, self._enter, self._leave),
                saved_tensors_hooks(self._save, lambda x: x),
            ):
                output = model(*args, **kwargs)
                outputs, fills_itself = [*Batch(output)], can_fill_itself(output)
                del output
            self._begin(Section(None, False, next_number()))
            self.sections.pop()
            # From here on no section uses anything.
            self._calls += 1
            roots = [x for x in outputs if x.requires_grad]
            losses = [x for x in roots if not x.dim()]
            self._settle(outputs)
            if roots:
                root = Root.apply(list, *(losses or roots))
                del outputs, roots
                self._sweep(self._backward(root, weights, inputs))
        return Sections(self.sections, [*self._values()], given, bool(losses), fills_itself)

    def _values(self) -> Iterator[Value]:
        for piece in self._pieces.values():
            x = piece.value
            if x.users or x.output or x.savers - {x.made}:
                yield x

    # Forward.

    def _enter(self, name: str, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._calls += 1
        if self._calls > 1:
            return
        self._begin(Section(name, True, next_number()))
        self._use((args, kwargs))
        sizes = [(x.shape, x.dtype, x.requires_grad) for x in _strided((args, kwargs))]
        kind = kind_of(block), *sizes
        self.kinds[len(self.sections) - 1] = kind
        self.calls.setdefault(kind, trees.map_leaves(_detached, (args, kwargs)))

    def _leave(self, name: str, *_: Any) -> None:
        self._calls -= 1
        if not self._calls:
            self._begin(Section(name, False, next_number()))

    def _begin(self, section: Section) -> None:
        self._kept[len(self.sections) - 1] = self._live
        self.sections[-1].nodes = section.first - self.sections[-1].first
        self._live = []
        self.sections.append(section)

    def _use(self, values: Any) -> None:
        """Take note of what the current section uses that another one has made."""
        now = len(self.sections) - 1
        for x in _strided(values):
            piece = self._pieces.get(_memory(x))
            if piece is not None and piece.value.made != now:
                piece.value.use(now, x)

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            piece = self._pieces.get(_memory(tensor))
            if piece is not None:
                piece.value.savers.add(len(self.sections) - 1)
        # Not the tensor itself, which would hold the node that holds it.
        return tensor.detach()

    def _settle(self, outputs: Iterable[Tensor]) -> None:
        """See what is left of the forward: what the graph keeps, and the output."""
        shared = set()
        for x in _strided(outputs):
            piece = self._pieces.get(_memory(x))
            if piece is not None:
                shared.add(id(piece.value))
                # Losses are joined, too, but take next to nothing.
                piece.value.output += x.nbytes if x.dim() else 0
                piece.value.gradient = max(piece.value.gradient, x.requires_grad * x.nbytes)
        shared |= {id(x) for x in self._values()}
        for k, pieces in self._kept.items():
            self._kept[k] = [x for x in pieces if x.lives and id(x.value) not in shared]
            self.sections[k].kept = sum(x.value.size for x in self._kept[k])

    # Backward.

    def _backward(
        self, root: Tensor, weights: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[Piece]:
        """Run backward, and return what it has made and what sections have kept for it."""
        self._end = next_number() - 1
        kept = [x for pieces in self._kept.values() for x in pieces]
        self._firsts = [x.first for x in self.sections]
        self._ticks, self._live, before = [], [], {*self._pieces}
        hooks = [x.register_hook(self._weigh) for x in weights]
        try:
            # Nothing is added to the weights' own gradients, and no hook behind that is called.
            torch.autograd.grad(root, [*weights, *inputs], allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        return kept + [x for memory, x in self._pieces.items() if memory not in before]

    def _weigh(self, grad: Tensor) -> Tensor:
        """Take note of the gradient of a weight, and let go of it, since all may not fit."""
        if grad.layout != torch.strided:
            return grad
        self._grads.add(_memory(grad))
        return grad.new_zeros(()).expand_as(grad)

    def _section(self) -> int:
        """The section of the node that runs."""
        assert self._ticks is not None
        node = _torch.current_node()
        number = self._end if node is None else number_of(node)
        if number < self._end:
            return max(0, bisect_right(self._firsts, number) - 1)
        # The first gradients are made in front of the last section. Gradients are added up between
        # nodes, and a model's own checkpoints run nodes that are new.
        return self._ticks[-1] if self._ticks else len(self.sections) - 1

    def _sweep(self, pieces: Iterable[Piece]) -> None:
        """Find the most memory of each section's backward."""
        assert self._ticks is not None
        ticks = self._ticks
        #: For each section, when memory comes and goes, for one and for more micro-batches.
        changes: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
        for piece in pieces:
            size, stay = piece.value.size, len(ticks)
            go = stay if piece.gone is None else piece.gone
            owners = {piece.value.made}
            if piece.reference in self._grads:
                # Without others to add it to, it stays as the gradient of the weight.
                go = piece.born + 1
            else:
                stay = go
                # What uses a gradient up has it in memory, too.
                owners.add(ticks[go - 1])
            for k in owners:
                alone, adding = changes.setdefault(k, ([], []))
                alone += [(piece.born, size), (stay, -size)]
                adding += [(piece.born, size), (go, -size)]
        for k, section in enumerate(self.sections):
            own = [t for t, x in enumerate(ticks) if x == k]
            if own and k in changes:
                section.alone, section.adding = (_most(x, own[0], own[-1]) for x in changes[k])

    # Both.

    def _note(self, inputs: Any, output: Any) -> None:
        """Take note of what an operator makes, and of what is gone since the one before."""
        now, tick = len(self.sections) - 1, 0
        if self._ticks is not None:
            now, tick = self._section(), len(self._ticks)
            self._ticks.append(now)
            self._live += self._kept.pop(now, [])
        elif not self._calls:
            self._use(inputs)
        for piece in self._live:
            if not piece.lives:
                piece.gone = tick
        self._live = [x for x in self._live if x.gone is None]
        for x in _strided(output):
            memory = _memory(x)
            if memory not in self._weights and memory not in self._pieces:
                piece = self._pieces[memory] = Piece(Value(now, _size(x)), x, tick)
                self._live.append(piece)
        if self._ticks is None:
            section = self.sections[now]
            section.forward = max(section.forward, sum(x.value.size for x in self._live))


def _most(changes: Iterable[tuple[int, int]], first: int, last: int) -> int:
    """The most memory from one operator to another, each of which makes it after others free."""
    now = most = 0
    for tick, change in sorted(changes):
        if tick > last:
            break
        if tick > first:
            most = max(most, now)
        now += change
    return max(most, now)


def _cloned(x: Any) -> Any:
    # What is changed in place must be no leaf.
    return _detached(x).clone() if isinstance(x, Tensor) else x


def _detached(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _strided(values: Any) -> list[Tensor]:
    """The tensors among values that have memory of their own."""
    found = [x for x in trees.leaves_of(values) if isinstance(x, Tensor)]
    return [x for x in found if x.layout == torch.strided]


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
