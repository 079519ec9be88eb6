"""The memory that one run of a module makes: what is alive of it, and the most at a time.

A run has sections, such as the calls of blocks, or forward and backward. What operators make
counts, not what they use inside, nor what is there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


@dataclass
class Section:
    """A part of a run."""

    #: The bytes of each memory that it has made, as long as somebody holds it.
    made: dict[StorageWeakRef, int] = field(default_factory=dict)
    #: The most bytes of these at a time.
    most: int = 0

    def alive(self) -> int:
        """The bytes of what it has made, and somebody holds."""
        self.made = {x: size for x, size in self.made.items() if not x.expired()}
        return sum(self.made.values())


class Meter:
    """The memory of one run, within ``watching(meter.note)``.

    Args:
        known: tensors whose memory does not count, such as weights.
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
