"""Selective checkpoints: a policy of PyTorch's says what the second run of a cell computes anew.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes two context managers, one for
each run. The first one keeps what the policy names, and the second one hands it out in place of
computing it. All else is done as without: the second run fills the slots of what was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torchgpipe.recompute.phase import is_recomputing

__all__: list[str] = []

#: A function that makes the context managers of both runs.
Contexts: TypeAlias = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class Selective:
    """The layers of one cell, with a context manager for each of their two runs.

    Args:
        run: runs the layers.
        contexts: makes the context managers.
    """

    __slots__ = ("_first", "_run", "_second")

    def __init__(self, run: Callable[..., Any], contexts: Contexts) -> None:
        self._run = run
        self._first, self._second = contexts()

    def __call__(self, value: Any, **more: Any) -> Any:
        """Run the layers."""
        with self._second if is_recomputing() else self._first:
            return self._run(value, **more)
