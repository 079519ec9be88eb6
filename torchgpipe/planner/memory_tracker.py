"""The memory of one run of a module: what its operators make, and when that is gone.

In forward, whoever runs the module tells which section is under way. In backward, the number of a
node of autograd tells which section the node belongs to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.autograd.nodes import next_number, number_of
from torchgpipe.engine.outcome import LARGE
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.record import Peaks, Section, Value
from torchgpipe.values.structure import leaves_of

__all__ = ["Piece", "Run", "highest", "memory_of", "size_of", "sizes_of", "strided", "watching"]

#: The names of peaks of backward.
WAYS = ("first", "later", "summing", "adding")


class Root(torch.autograd.Function):
    """A number whose backward makes the gradients of tensors, and nobody else holds them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.metas = [(x.shape, x.dtype, x.device) for x in tensors]
        # The number is real, whatever the tensors are.
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.metas]
        )


class Piece:
    """Memory, from the operator that makes it until nobody holds it."""

    def __init__(
        self, value: Value, tensor: Tensor, born: int = 0, *, is_root: bool = False
    ) -> None:
        self.value, self.size = value, value.size
        self.born, self.is_root = born, is_root
        self.reference = memory_of(tensor)
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


class Run:
    """The memory of one run of a module, whose weights are counted elsewhere."""

    def __init__(self, module: nn.Module, sections: list[Section]) -> None:
        self.sections = sections
        self._weights = {memory_of(x) for _, x in tensors(module) if x.layout == torch.strided}
        #: All memory but that of weights.
        self.pieces: dict[StorageWeakRef, Piece] = {}
        #: What each section has made that its backward may free, and what may go now.
        self._kept: dict[int, list[Piece]] = {}
        self._live: list[Piece] = []
        #: The calls under way, in each other. What these use of others is known beforehand.
        self.calls = 1
        #: The memory of the gradients of weights, and whether it is large.
        self._grads: dict[StorageWeakRef, bool] = {}
        #: The section of each operator of backward; None in forward.
        self.ticks: list[int] | None = None
        #: How many gradients of outputs are still to be made.
        self._roots = 0

    def give(self, value: Value, x: Tensor) -> None:
        """Take note of memory that is there before the first section runs."""
        self.pieces.setdefault(memory_of(x), Piece(value, x))

    @property
    def alive(self) -> list[Piece]:
        """The memory that operators have made, and that somebody holds."""
        return [x for x in self._live if x.lives]

    # Forward.

    def begin(self, section: Section) -> None:
        """Begin another section."""
        self._kept[len(self.sections) - 1] = self._live
        self._live = []
        self.sections.append(section)

    def use(self, values: Any) -> None:
        """Take note of what the current section uses that another one has made."""
        now = len(self.sections) - 1
        for x in strided(values):
            piece = self.pieces.get(memory_of(x))
            if piece is not None and piece.value.made != now:
                piece.value.use(now, x, piece.value.made)

    @property
    def saving(self) -> saved_tensors_hooks:
        """Context manager that takes note of what is saved for backward."""
        return saved_tensors_hooks(self._save, lambda x: x)

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            piece = self.pieces.get(memory_of(tensor))
            if piece is not None:
                piece.value.savers.add(len(self.sections) - 1)
                self.sections[-1].again = self.sections[-1].forward
        # Not a tensor that has a node, or may get one, which would hold the node that holds it.
        return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()

    def settle(self, shared: set[int]) -> None:
        """See what is left of the forward for each section's backward, values aside."""
        self._kept.setdefault(len(self.sections) - 1, self._live)
        for k, pieces in self._kept.items():
            self._kept[k] = alive = [x for x in pieces if x.lives]
            for x in alive:
                # What others use, too, goes with the section's own backward, if that needs it.
                x.is_shared = id(x.value) in shared
            self.sections[k].pieces = [x.size for x in alive if not x.is_shared]
            self.sections[k].kept = sum(self.sections[k].pieces)

    # Backward.

    def turn(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Make the number that backward begins with, and that makes the gradients of tensors."""
        root, self._roots = Root.apply(*tensors) if tensors else None, len(tensors)
        self._end = next_number() - 1
        self._firsts, self.ticks = [x.first for x in self.sections], []
        return root

    def backward(
        self, root: Tensor | None, weights: Sequence[Tensor], ends: Sequence[GradientEdge]
    ) -> list[dict[int, int]]:
        """Run backward; see the most memory of each section, and that of the gradients of ends."""
        kept = [x for pieces in self._kept.values() for x in pieces]
        self._live, before = [], {*self.pieces}
        if root is None or not (weights or ends):
            return []
        wanted: Any = [*weights, *ends]
        hooks = [x.register_hook(partial(self._weigh, x)) for x in weights]
        try:
            # Nothing is added to the weights' own gradients, and no hook after that is called.
            found = torch.autograd.grad(root, wanted, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        self._let_go(len(self.ticks or []))
        sizes = [sizes_of(x) for x in found[len(weights) :]]
        del found
        self._sweep([*kept, *[x for at, x in self.pieces.items() if at not in before]])
        return sizes

    def _weigh(self, weight: Tensor, grad: Tensor) -> Tensor:
        """Take note of the gradient of a weight, and let go of it, since all may not fit.

        Autograd gets the weight in its place, which takes no memory, and stays as it is.
        """
        if grad.layout != torch.strided:
            return grad
        self._grads[memory_of(grad)] = grad.nbytes >= LARGE
        return weight

    def _section(self, ticks: Sequence[int]) -> tuple[int, bool]:
        """The section of the node that runs, and whether it makes the gradients of outputs."""
        node = _torch.current_node()
        number = self._end if node is None else number_of(node)
        if number < self._end:
            return max(0, bisect_right(self._firsts, number) - 1), False
        # The first gradients are made in front of the last section. Gradients are added up between
        # nodes, and a model's own checkpoints run nodes that are new.
        last = ticks[-1] if ticks else len(self.sections) - 1
        return last, number == self._end and node is not None

    def _sweep(self, pieces: Iterable[Piece]) -> None:
        """Find the most memory of each section's backward."""
        ticks = self.ticks or []
        owned: dict[int, list[Piece]] = {}
        for piece in pieces:
            owners = {piece.value.made}
            if piece.reference not in self._grads and piece.gone is not None:
                # What uses a gradient up has it in memory, too.
                owners.add(ticks[piece.gone - 1])
            for k in owners:
                owned.setdefault(k, []).append(piece)
        parts: dict[int, range] = {}
        for tick, k in enumerate(ticks):
            parts[k] = range(parts[k].start if k in parts else tick, tick + 1)
        for k, own in owned.items():
            if k in parts and k >= 0:
                section = self.sections[k]
                section.free, section.held = (
                    Peaks(*[self._most(k, own, parts[k], way, is_held=x) for way in WAYS])
                    for x in (False, True)
                )

    def _most(
        self, k: int, pieces: Iterable[Piece], part: range, way: str, *, is_held: bool
    ) -> float:
        """The most memory of a section's part of backward, with the gradients of weights."""
        lives = []
        for piece in pieces:
            size, end = piece.size, part.stop
            if piece.is_shared and k not in piece.value.savers:
                continue
            go = end if piece.gone is None or (is_held and piece.is_root) else piece.gone
            large = self._grads.get(piece.reference)
            if large is not None:
                waits = way == "first" or (way == "later" and not large)
                go = end if waits else piece.born + 1
                # A schedule adds to the first gradient in place, and autograd makes a new tensor.
                size *= 2 if way == "summing" else 1
            # Values are counted by whoever has them, until they go.
            lives.append((-size, go, end) if piece.is_shared else (size, piece.born, go))
        return _most_of(lives, part)

    # Both.

    def watching(self) -> Any:
        """Context manager that sees what operators make, and what is gone since the one before."""
        return watching(self._note)

    def _note(self, inputs: Any, output: Any) -> None:
        now, tick, is_root = len(self.sections) - 1, 0, False
        if self.ticks is not None:
            (now, is_root), tick = self._section(self.ticks), len(self.ticks)
            self.ticks.append(now)
            self._live += self._kept.pop(now, [])
        elif not self.calls:
            self.use(inputs)
        self._let_go(tick)
        for x in strided(output):
            memory = memory_of(x)
            if memory not in self._weights and memory not in self.pieces:
                # Sums of the gradients of outputs are made after all of them.
                is_root = is_root and self._roots > 0
                self._roots -= is_root
                piece = Piece(Value(now, size_of(x)), x, tick, is_root=is_root)
                self.pieces[memory] = piece
                self._live.append(piece)
        if self.ticks is None:
            section = self.sections[now]
            section.forward = max(section.forward, sum(x.size for x in self._live))

    def _let_go(self, tick: int) -> None:
        """Take note of what is gone since the operator before."""
        for piece in self._live:
            if not piece.lives:
                piece.gone = tick
        self._live = [x for x in self._live if x.gone is None]


def highest(pieces: Iterable[Piece], part: range) -> float:
    """The most memory of pieces from one operator to another."""
    return _most_of(
        [(x.size, x.born, part.stop if x.gone is None else x.gone) for x in pieces], part
    )


def _most_of(lives: Iterable[tuple[float, int, int]], part: range) -> float:
    """The most of sizes, each from one operator to another, which frees it before it makes any."""
    changes = sorted(x for size, born, gone in lives for x in ((born, size), (gone, -size)))
    now = most = 0.0
    for tick, change in changes if part else ():
        if tick >= part.stop:
            break
        if tick > part.start:
            most = max(most, now)
        now += change
    return max(most, now)


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """The memory of a tensor, which this does not hold."""
    return StorageWeakRef(tensor.untyped_storage())


def size_of(tensor: Tensor) -> int:
    """The bytes of the memory of a tensor."""
    return tensor.untyped_storage().nbytes()


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


def strided(values: Any) -> list[Tensor]:
    """The tensors among values that have memory of their own, as sparse ones have not."""
    found = [x for x in leaves_of(values) if isinstance(x, Tensor)]
    return [x for x in found if x.layout == torch.strided]


def sizes_of(values: Any) -> dict[int, int]:
    """The addresses of the memory of tensors among values, with its bytes."""
    found = [x.untyped_storage() for x in strided(values) if x.numel()]
    return {x.data_ptr(): x.nbytes() for x in found}
