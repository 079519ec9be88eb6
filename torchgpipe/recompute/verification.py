"""Verification: what a recomputation saves for backward is compared with what the forward saved.

Some kernels save memory to which they write only in part, as ``ctc_loss`` does. What they leave is
different in each run, and backward does not read it. So while runs that are compared compute,
PyTorch fills all new memory with NaN, and integers with their maximum. PyTorch does that only in
its deterministic mode, which is one for the whole process.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import Tensor

from torchgpipe.ambient.notes import layer as current
from torchgpipe.recompute.slots import Slot

__all__ = ["verify_recomputation"]


#: The ``with`` blocks of :class:`verify_recomputation` that the process is in.
_verifications: list[verify_recomputation] = []


class verify_recomputation(ContextDecorator):
    """Compare the values that a recomputation saves for backward with those of the forward.

    That finds layers that do not compute the same from the same input::

        with verify_recomputation():
            model(input).sum().backward()

    The block applies to forwards that run within it, and takes the memory that checkpointing saves.
    Without it, a recomputation compares only the number, shapes and dtypes of saved tensors.
    """

    def __enter__(self) -> None:
        _verifications.append(self)

    def __exit__(self, *_: object) -> None:
        _verifications.remove(self)


def is_verifying() -> bool:
    """Whether recomputations of what is computed now will be compared."""
    return bool(_verifications)


#: A module whose attribute types do not know.
settings: Any = torch.utils.deterministic


class FilledMemory:
    """Make PyTorch fill new memory, within ``with`` blocks of any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._found = (
                    torch.are_deterministic_algorithms_enabled(),
                    torch.is_deterministic_algorithms_warn_only_enabled(),
                    settings.fill_uninitialized_memory,
                )
                # Operators without such an algorithm are as good as ever.
                self._warnings = warnings.catch_warnings()
                self._warnings.__enter__()
                warnings.filterwarnings("ignore", ".*does not have a deterministic implementation")
                warnings.filterwarnings("ignore", "Deterministic behavior was enabled")
                if not self._found[0]:
                    torch.use_deterministic_algorithms(True, warn_only=True)
                settings.fill_uninitialized_memory = True
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                mode, warn_only, settings.fill_uninitialized_memory = self._found
                torch.use_deterministic_algorithms(mode, warn_only=warn_only)
                self._warnings.__exit__(None, None, None)


_filled_memory = FilledMemory()


def filling_memory(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, within which PyTorch fills new memory."""

    def filling(argument: Any) -> Any:
        with _filled_memory:
            return function(argument)

    return filling


class Compared(Slot):
    """A slot whose recomputed value is compared with the forward's."""

    __slots__ = ("expected", "kind")

    def __init__(self, tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> None:
        super().__init__(tensor, shapes)
        self.kind = current.kind
        self.expected: Tensor | None = tensor.detach()

    def close(self) -> None:
        """Take note of the value when the layers have run, since only then all of it is written."""
        assert self.expected is not None
        self.expected = self.expected.clone()

    def compare(self) -> None:
        """Compare the recomputed value with the forward's.

        Raises:
            RuntimeError: they differ.
        """
        expected, self.expected = self.expected, None
        try:
            torch.testing.assert_close(self.tensor, expected, equal_nan=True)
        except AssertionError as error:
            # The note on the error must name the layer that saved the tensor, which ran long ago.
            current.name, current.kind = self.layer, self.kind
            raise RuntimeError(
                "a recomputation must compute the same values as the forward "
                f"(layer: {self.layer}, shape: {tuple(self.shape)}); make the layer compute the "
                f"same from the same input whenever it runs\n{error}"
            ) from None


def dropped(tensor: Tensor, shapes: dict[torch.Size, torch.Size]) -> Slot:
    """A slot for a tensor that is dropped.

    Tensors of bytes are not compared. They may be the workspace of a kernel, as an LSTM's, some of
    which the kernel never writes. Nobody can compare those of MKL-DNN.
    """
    kind = Slot if tensor.dtype == torch.uint8 or tensor.is_mkldnn else Compared
    return kind(tensor, shapes)
