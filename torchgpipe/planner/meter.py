"""The memory that one run of a module makes: what stays for backward, and the most at a time.

A run has sections, such as the calls of blocks: forward tells which one is under way, and in
backward the number of each node of autograd does. What operators make counts, not what they use
inside, nor what is there before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.autograd.nodes import next_number, number_of
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


@dataclass
class Section:
    """A part of a run, with the bytes of what it makes."""

    #: The number of its first node of autograd.
    first: int
    #: What it has made, and the bytes.
    made: dict[StorageWeakRef, int] = field(default_factory=dict)
    #: The most of what it makes in forward at a time, and the most above the beginning of backward.
    forward: float = 0
    backward: float = 0

    @property
    def alive(self) -> int:
        """The bytes of what it has made in forward, and somebody holds."""
        return sum(size for x, size in self.made.items() if not x.expired())


class Meter:
    """The memory of one run.

    Args:
        known: tensors whose memory does not count, such as weights.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        #: All memory that is no news.
        self._seen = {memory_of(x) for x in strided(known)}
        self.sections: list[Section] = []
        self._now: Section | None = None
        #: In backward, the numbers of the first nodes, and that of the end of forward.
        self._firsts: list[int] | None = None
        #: What is watched, until it is gone, and the bytes of it above those at the beginning.
        self._watched: dict[StorageWeakRef, int] = {}
        self._level = 0

    def enter(self) -> Section:
        """Begin another section."""
        self._now, self._watched, self._level = Section(next_number()), {}, 0
        self.sections.append(self._now)
        return self._now

    def backward(
        self, roots: Iterable[GradientEdge], grads: Iterable[Tensor], ends: Iterable[Any]
    ) -> None:
        """Run backward within :meth:`watching`, as :func:`torch.autograd.grad` does.

        Gradients of weights among the ends are let go of, since all may not fit.
        """
        self.turn()
        roots, grads, ends = [*roots], [*grads], [*ends]
        if not roots or not ends:
            return
        # Autograd gets the weight in the place of its gradient: it takes no memory.
        hooks = [x.register_hook(lambda _, x=x: x) for x in ends if isinstance(x, Tensor)]
        try:
            torch.autograd.grad(roots, ends, grads, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()

    def turn(self) -> None:
        """Begin backward, which begins with the last section."""
        self._end, self._firsts = next_number(), [x.first for x in self.sections]
        self._begin(self.sections[-1])

    def _begin(self, section: Section) -> None:
        """Begin the backward of a section, which may free what it has made."""
        self._let_go()
        made = {x: size for x, size in section.made.items() if not x.expired()}
        self._now, self._watched, self._level = section, {**self._watched, **made}, 0

    def watching(self) -> Any:
        """Context manager in which operators are seen, those of backward among them."""
        return watching(lambda _, output: self._note(output))

    def _note(self, output: Any) -> None:
        if self._firsts is not None:
            node = _torch.current_node()
            number = self._end if node is None else number_of(node)
            # Sums of gradients belong to no node, and a model's own checkpoints make new ones.
            if number < self._end:
                own = self.sections[max(0, bisect_right(self._firsts, number) - 1)]
                if own is not self._now:
                    self._begin(own)
        section = self._now
        if section is None:
            # What is there before counts elsewhere.
            self._seen |= {memory_of(x) for x in strided(output)}
            return
        self._let_go()
        for x in strided(output):
            memory = memory_of(x)
            if memory not in self._seen:
                self._seen.add(memory)
                self._watched[memory] = size = size_of(x)
                self._level += size
                if self._firsts is None:
                    section.made[memory] = size
        if self._firsts is None:
            section.forward = max(section.forward, self._level)
        else:
            section.backward = max(section.backward, self._level)

    def _let_go(self) -> None:
        """Take note of what is gone since the operator before."""
        for x in [x for x in self._watched if x.expired()]:
            self._level -= self._watched.pop(x)

    def rest(self) -> int:
        """Count from here on what is above the memory now, and return that: its bytes."""
        section = self._now
        assert section is not None
        self._let_go()
        section.backward = self._level = 0
        return sum(self._watched.values())


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """The memory of a tensor, which this does not hold."""
    return StorageWeakRef(tensor.untyped_storage())


def size_of(tensor: Tensor) -> int:
    """The bytes of the memory of a tensor."""
    return tensor.untyped_storage().nbytes()


def bytes_of(values: Any) -> int:
    """The bytes of the memory of all tensors among values."""
    return sum({memory_of(x): size_of(x) for x in strided(values)}.values())


def strided(values: Any) -> list[Tensor]:
    """The tensors among values that have memory of their own, as sparse ones have not."""
    found = [x for x in leaves_of(values) if isinstance(x, Tensor)]
    return [x for x in found if x.layout == torch.strided]


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
