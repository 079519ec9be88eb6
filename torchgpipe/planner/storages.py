"""The memory that operators allocate, on devices whose allocator does not count it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchgpipe import _torch
from torchgpipe.values import trees

__all__: list[str] = []


class LiveStorages:
    """The storages that operators have made within a ``with`` block and that still live."""

    def __init__(self) -> None:
        self._made: dict[StorageWeakRef, int] = {}
        #: The most bytes that lived at the same time.
        self.highest = 0
        self._mode = watching(self.add)

    def __enter__(self) -> LiveStorages:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)

    def add(self, inputs: Any, output: Any) -> None:
        """Take note of the storages that an operator has made."""
        known = {StorageWeakRef(x.untyped_storage()) for x in strided(inputs)}
        for x in strided(output):
            reference = StorageWeakRef(x.untyped_storage())
            if reference not in known:
                self._made[reference] = x.untyped_storage().nbytes()
        self.highest = max(self.highest, sum(self.sizes()))

    def sizes(self) -> list[int]:
        """The bytes of each storage that still lives."""
        # A step makes thousands, which would be asked again behind each operator.
        self._made = {key: size for key, size in self._made.items() if not key.expired()}
        return [*self._made.values()]


def watching(note: Callable[[Any, Any], None]) -> Any:
    """Context manager that calls a function with the inputs and the output of each operator.

    Operators of backward are among them, wherever it runs in a thread of the block.
    """
    return _mode()(note)


# Made once, since only Python's collector frees a class.
@cache
def _mode() -> Any:
    # To mypy, PyTorch's class is any object.
    class Mode(_torch.DispatchMode):  # type: ignore[misc]
        def __init__(self, note: Callable[[Any, Any], None]) -> None:
            super().__init__()
            self._note = note

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            self._note((args, kwargs), output)
            return output

    return Mode


def strided(values: Any) -> list[Tensor]:
    """The tensors among values that have memory of their own, as sparse ones have not."""
    found = [x for x in trees.leaves_of(values) if isinstance(x, Tensor)]
    return [x for x in found if x.layout == torch.strided]


def sizes_of(values: Any) -> dict[int, int]:
    """The addresses of the memory of tensors among values, with its bytes."""
    found = [x.untyped_storage() for x in strided(values) if x.numel()]
    return {x.data_ptr(): x.nbytes() for x in found}
