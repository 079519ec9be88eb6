"""The tracker of memory of a model, which runs once, forward and backward.

Operators tell which memory they make, and when that is gone. In backward, the number of a node of
autograd tells which section the node belongs to.

Layers are recorded one by one, each on a copy of what those before it have handed on, so that a
model may be larger than the device.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.autograd.nodes import next_number, number_of
from torchgpipe.autograd.outcome import LARGE
from torchgpipe.mapped.on_demand import can_fill_itself
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.blocks import hooked, kind_of, unchanged
from torchgpipe.planner.record import (
    GIVEN,
    Halved,
    Peaks,
    Record,
    Root,
    Section,
    Value,
    halved,
    own_outputs,
    sizes_of,
)
from torchgpipe.planner.sandbox import Sandbox, watching
from torchgpipe.values import trees
from torchgpipe.values.microbatch import VALUE, Batch

__all__ = ["MemoryTracker"]

#: The names of peaks of backward.
WAYS = ("first", "second", "later", "summing", "adding")


class Piece:
    """Memory, from the operator that makes it until nobody holds it.

    Args:
        value: its sizes and users.
        tensor: a tensor in it.
        born: the number of the operator.
        is_root: whether it is the gradient of an output.
    """

    def __init__(
        self, value: Value, tensor: Tensor, born: int = 0, *, is_root: bool = False
    ) -> None:
        self.value, self.born, self.is_root = value, born, is_root
        self.reference = _memory(tensor)
        #: Whether it is a value, and no memory of the section alone.
        self.is_shared = False
        #: The number of the first operator that finds it gone.
        self.gone: int | None = None

    @property
    def is_used(self) -> bool:
        """Whether others than its maker use it."""
        x = self.value
        return bool(x.users or x.output or x.savers - {x.made})

    @property
    def lives(self) -> bool:
        """Whether somebody holds it."""
        return not self.reference.expired()


class MemoryTracker:
    """The record of one run, or of layers, one after the other."""

    def __init__(self) -> None:
        self.sections: list[Section] = []
        self._weights: set[StorageWeakRef] = set()
        #: All memory but that of weights.
        self._pieces: dict[StorageWeakRef, Piece] = {}
        #: What each section has made that its backward may free, and what may go now.
        self._kept: dict[int, list[Piece]] = {}
        self._live: list[Piece] = []
        self._calls = 0
        #: The kind of each section that is a call, and the arguments of the first one of a kind.
        self.kinds: dict[int, object] = {}
        self.calls: dict[object, tuple[Any, Any]] = {}
        #: The memory of the gradients of weights, and whether it is large.
        self._grads: dict[StorageWeakRef, bool] = {}
        #: The section of each operator of backward; None in forward.
        self._ticks: list[int] | None = None
        #: The values of layers, and of what they hand on with the layer that it comes from.
        self._values: dict[int, Value] = {}
        self._handed: dict[StorageWeakRef, tuple[Value, int]] = {}

    # A whole model.

    def record(
        self, model: nn.Module, blocks: Mapping[str, nn.Module], args: Any, kwargs: Any
    ) -> Record:
        """Run a model forward and backward."""
        self._weights = {_memory(x) for _, x in tensors(model) if x.layout == torch.strided}
        self.sections = [Section(None, False, next_number())]
        given = _strided((args, kwargs))
        for x in given:
            self._pieces.setdefault(_memory(x), Piece(Value(GIVEN, _size(x)), x))
        size = sum(x.value.size for x in self._pieces.values())
        weights = [x for x in model.parameters() if x.requires_grad]
        ends = [get_gradient_edge(x) for x in given if x.requires_grad]
        with (
            unchanged(model),
            torch.inference_mode(False),
            torch.enable_grad(),
            watching(self._note),
        ):
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
            shared = {*map(self._return, _strided(outputs))}
            self._settle(shared | {id(x.value) for x in self._pieces.values() if x.is_used})
            root = Root.apply(*(losses or roots)) if roots else None
            del outputs, roots
            self._backward(root, weights, ends)
        values = [x.value for x in self._pieces.values() if x.is_used]
        return Record(self.sections, values, size, bool(losses), fills_itself)

    def _return(self, x: Tensor) -> int:
        """Take note that the caller gets a tensor; the identity of its value."""
        piece = self._pieces.get(_memory(x))
        if piece is not None:
            _returned(piece.value, x)
        return id(piece and piece.value)

    # Layers.

    def layer(self, sandbox: Sandbox) -> None:
        """Run a layer forward and backward, on what those before it have handed on."""
        k = len(self.sections)
        self.sections.append(Section("", True, next_number()))
        layer, before = sandbox.layer, sandbox.batch
        self._weights = {_memory(x) for _, x in tensors(layer) if x.layout == torch.strided}
        self._kept, self._live, self._ticks, self._grads = {}, [], None, {}
        self._calls, self._pieces = 1, {}
        batch = sandbox.input()
        ends: dict[int, GradientEdge] = {}
        #: The skip of each of these, if it is one.
        popped: dict[int, Value | None] = {}
        #: The values of the input, and of the output.
        given: dict[StorageWeakRef, Value] = {}
        for key, own in before.parts.items():
            passes_by = key in sandbox.output.skips
            for x, y in zip(own, batch.parts[key]):
                value, source = self._handed.get(_memory(x)) or (Value(GIVEN, _size(x)), GIVEN)
                self._values.setdefault(id(value), value)
                given[_memory(x)] = value
                self._pieces.setdefault(_memory(y), Piece(value, y))
                if not passes_by:
                    value.use(k, x, source, is_skip=key is not VALUE)
                    if y.requires_grad:
                        ends[id(y)] = get_gradient_edge(y)
                        popped[id(y)] = value if key is not VALUE else None
        with watching(self._note):
            with saved_tensors_hooks(self._save, lambda x: x):
                output = sandbox.forward(batch)
            shared, roots = self._hand_on(k, sandbox, output), own_outputs(sandbox, output)
            given |= {memory: value for memory, (value, _) in self._handed.items()}
            self._settle(shared)
            root = Root.apply(*roots) if roots else None
            del output, batch, roots
            if ends:
                del y
            weights = [x for x in layer.parameters() if x.requires_grad]
            sizes = self._backward(root, weights, [*ends.values()])
        skips = [(value, size) for value, size in zip(popped.values(), sizes) if value is not None]
        if skips:
            for value, size in skips:
                value.holds[k] = sum(size.values())
            held = {place: x for _, size in skips for place, x in size.items()}
            every = {place: x for size in sizes for place, x in size.items()}
            self.sections[k].rest = sum(every.values()) - sum(held.values())
        if root is None:
            self.sections[k].halves = Halved()
            return
        self.sections[k].halves, late = halved(sandbox)
        for x in late:
            given[_memory(x)].late.add(k)

    def _hand_on(self, k: int, sandbox: Sandbox, output: Batch) -> set[int]:
        """Take note of what a layer hands on, and of what it has made of that."""
        shared, handed = set(), {}
        self._last: list[tuple[Value, Tensor]] = []
        for key, own in sandbox.output.parts.items():
            passes_by = key in sandbox.batch.skips
            for x, y in zip(own, output.parts[key]):
                if x.layout != torch.strided:
                    continue
                piece = self._pieces.get(_memory(y))
                value = Value(k, _size(y)) if piece is None else piece.value
                self._values.setdefault(id(value), value)
                shared.add(id(value))
                self._last.append((value, x))
                before = next(
                    (self._handed.get(_memory(z)) for z in sandbox.batch.parts.get(key, ())), None
                )
                source = before[1] if passes_by and before is not None else k
                handed[_memory(x)] = value, source
        self._handed = handed
        return shared

    def layers(self) -> Record:
        """The record of all layers, the last of which returns what it hands on."""
        for value, x in self._last:
            _returned(value, x)
        return Record(self.sections, [*self._values.values()])

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
        self._live = []
        self.sections.append(section)

    def _use(self, values: Any) -> None:
        """Take note of what the current section uses that another one has made."""
        now = len(self.sections) - 1
        for x in _strided(values):
            piece = self._pieces.get(_memory(x))
            if piece is not None and piece.value.made != now:
                piece.value.use(now, x, piece.value.made)

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            piece = self._pieces.get(_memory(tensor))
            if piece is not None:
                piece.value.savers.add(len(self.sections) - 1)
                self.sections[-1].again = self.sections[-1].forward
        # Not the tensor itself, which would hold the node that holds it.
        return tensor.detach()

    def _settle(self, shared: set[int]) -> None:
        """See what is left of the forward for each section's backward, values aside."""
        self._kept.setdefault(len(self.sections) - 1, self._live)
        for k, pieces in self._kept.items():
            self._kept[k] = alive = [x for x in pieces if x.lives]
            for x in alive:
                # What others use, too, goes with the section's own backward, if that needs it.
                x.is_shared = id(x.value) in shared
            self.sections[k].kept = sum(x.value.size for x in alive if not x.is_shared)

    # Backward.

    def _backward(
        self, root: Tensor | None, weights: Sequence[Tensor], ends: Sequence[GradientEdge]
    ) -> list[dict[int, int]]:
        """Run backward, and see the most memory of each section's part of it.

        Returns:
            The memory of the gradients of ends.
        """
        self._end = next_number() - 1
        kept = [x for pieces in self._kept.values() for x in pieces]
        self._firsts = [x.first for x in self.sections]
        self._ticks, self._live, before = [], [], {*self._pieces}
        if root is None or not (weights or ends):
            return []
        wanted: Any = [*weights, *ends]
        hooks = [x.register_hook(self._weigh) for x in weights]
        try:
            # Nothing is added to the weights' own gradients, and no hook after that is called.
            found = torch.autograd.grad(root, wanted, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        sizes = [sizes_of([] if x is None else [x]) for x in found[len(weights) :]]
        del found
        self._sweep([*kept, *[x for at, x in self._pieces.items() if at not in before]])
        return sizes

    def _weigh(self, grad: Tensor) -> Tensor:
        """Take note of the gradient of a weight, and let go of it, since all may not fit."""
        if grad.layout != torch.strided:
            return grad
        self._grads[_memory(grad)] = grad.nbytes >= LARGE
        return grad.new_zeros(()).expand_as(grad)

    def _section(self) -> tuple[int, bool]:
        """The section of the node that runs, and whether it makes the gradients of outputs."""
        assert self._ticks is not None
        node = _torch.current_node()
        number = self._end if node is None else number_of(node)
        if number < self._end:
            return max(0, bisect_right(self._firsts, number) - 1), False
        # The first gradients are made in front of the last section. Gradients are added up between
        # nodes, and a model's own checkpoints run nodes that are new.
        last = self._ticks[-1] if self._ticks else len(self.sections) - 1
        return last, number == self._end and node is not None

    def _sweep(self, pieces: Iterable[Piece]) -> None:
        """Find the most memory of each section's backward."""
        assert self._ticks is not None
        ticks = self._ticks
        owned: dict[int, list[Piece]] = {}
        for piece in pieces:
            owners = {piece.value.made}
            if piece.reference not in self._grads and piece.gone is not None:
                # What uses a gradient up has it in memory, too.
                owners.add(ticks[piece.gone - 1])
            for k in owners:
                owned.setdefault(k, []).append(piece)
        for k, own in owned.items():
            span = [t for t, x in enumerate(ticks) if x == k]
            if span and k >= 0:
                section = self.sections[k]
                section.free, section.held = (
                    Peaks(*[self._most(k, own, span, way, is_held=x) for way in WAYS])
                    for x in (False, True)
                )

    def _most(
        self, k: int, pieces: Iterable[Piece], span: Sequence[int], way: str, *, is_held: bool
    ) -> float:
        """The most memory from one operator to another; each makes it after others free it."""
        end = span[-1] + 1
        changes: list[tuple[int, float]] = []
        for piece in pieces:
            size = piece.value.size
            if piece.is_shared and k not in piece.value.savers:
                continue
            go = end if piece.gone is None or (is_held and piece.is_root) else piece.gone
            large = self._grads.get(piece.reference)
            if large is not None:
                waits = way == "first" or (way in ("second", "later") and not large)
                # Sums are made in place: nothing else holds the first gradient.
                go = end if waits else piece.born + 1
            changes += [(go, -size)] if piece.is_shared else [(piece.born, size), (go, -size)]
        now = most = 0.0
        for tick, change in sorted(changes):
            if tick > span[-1]:
                break
            if tick > span[0]:
                most = max(most, now)
            now += change
        return max(most, now)

    # Both.

    def _note(self, inputs: Any, output: Any) -> None:
        """Take note of what an operator makes, and of what is gone since the one before."""
        now, tick, is_root = len(self.sections) - 1, 0, False
        if self._ticks is not None:
            (now, is_root), tick = self._section(), len(self._ticks)
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
                piece = Piece(Value(now, _size(x)), x, tick, is_root=is_root)
                self._pieces[memory] = piece
                self._live.append(piece)
        if self._ticks is None:
            section = self.sections[now]
            section.forward = max(section.forward, sum(x.value.size for x in self._live))


def _returned(value: Value, x: Tensor) -> None:
    # Losses are joined, too, but take next to nothing.
    value.output += x.nbytes if x.dim() else 0
    value.gradient = max(value.gradient, x.requires_grad * x.nbytes)


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
