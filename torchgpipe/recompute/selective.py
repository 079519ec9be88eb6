"""Selective checkpoints: a policy of PyTorch's says what the second run of a cell computes anew.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes two context managers, one for
each run. The first one keeps what the policy names, and the second one hands it out in place of
computing it. All else is done as without: the second run fills the slots of what was dropped.

PyTorch counts the operators of both runs, and knows by its number what to hand out. So the layers
alone run within the context managers, and not what is done around one of the runs, such as copying
buffers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torchgpipe.recompute.phase import is_recomputing

__all__: list[str] = []

#: The context managers of the first and the second run of one cell.
Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

#: For cells without a policy.
NOTHING: AbstractContextManager[None] = nullcontext()


def of_this_run(contexts: Contexts) -> AbstractContextManager[Any]:
    """The context manager of the run that goes on."""
    first, second = contexts
    return second if is_recomputing() else first
