"""Selective checkpoints: a policy of PyTorch's says what the recomputation of a cell computes anew.

``torch.utils.checkpoint.create_selective_checkpoint_contexts`` makes two context managers, one for
each run. The first one keeps what the policy names, and the second one hands it out in place of
computing it. Without a policy and with one, the recomputation fills the slots of dropped tensors.

PyTorch counts the operators of both runs, and knows by its number what to hand out. So the layers
alone run within the context managers, and not what is done around one of the runs, such as copying
buffers, or within a layer in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.utils import checkpoint

from torchgpipe import _torch
from torchgpipe._torch.attributes import bypass_hooks, judge_by, keeps_results, schema_of
from torchgpipe.ambient.modes import own_casts
from torchgpipe.partition.keeping import Policy

__all__: list[str] = []

#: The context managers of a cell's first run, and of its recomputation.
Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

CheckpointPolicy = checkpoint.CheckpointPolicy
#: What a policy returns for an operator whose result is kept. PyTorch takes True for MUST_SAVE.
KEPT = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE, True)


def contexts_of(policy: Policy) -> Contexts:
    """The context managers of the two runs of a cell."""
    first, second = policy()
    if not keeps_results(first):
        # The user's own context managers, which have no policy, and so no operators to count.
        return first, second
    bypass_hooks(first)
    judge_by(first, judged)
    judge_by(second, judged)
    return Counted(first), Counted(second)


def judged(
    policy: Callable[..., Any], context: Any, operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Choose what becomes of the result of an operator, as the policy does."""
    choice = policy(context, operator, *args, **kwargs)
    # guard: operators that do more than to return
    more = choice in KEPT and does_more(operator, args, kwargs)
    return CheckpointPolicy.PREFER_RECOMPUTE if more else choice


class uncounted:
    """Compute within a ``with`` block what one of the two runs alone does, and no policy counts."""

    def __enter__(self) -> None:
        self._mode = None
        count = _torch.count_dispatch_modes()
        modes = _torch.KeepingMode, _torch.GivingMode
        if count and isinstance(_torch.dispatch_mode_at(count - 1), modes):
            self._mode = _torch.pop_dispatch_mode(None)

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            _torch.push_dispatch_mode(self._mode)


def does_more(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator changes an argument, or draws random numbers.

    A recomputation without it would find another value there, or draw other numbers after it.
    """
    schema = schema_of(operator)
    if schema is None or schema.is_mutable:
        return schema is not None
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    named = {**dict(zip([x.name for x in schema.arguments], args)), **kwargs}
    chances = [
        named.get(x.name, x.default_value) for x in schema.arguments if x.name in ("p", "dropout_p")
    ]
    # With a probability of zero, as in attention without dropout, no number is drawn.
    return any(chances) or not chances


class Counted:
    """The context manager of a run within a mode of PyTorch's."""

    def __init__(self, mode: AbstractContextManager[Any]) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        # A run that took a cast weight from autocast's cache would have fewer operators than the
        # other run, and PyTorch would hand out results of wrong operators.
        # guard: casts of both runs
        self._casts: AbstractContextManager[None] = own_casts()
        self._casts.__enter__()
        self._mode.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        self._casts.__exit__(*raised)
        kind, error, _ = raised
        if kind is RuntimeError and "has been mutated" in str(error):
            raise RuntimeError(
                "what a policy keeps must not be changed in place later "
                f"(PyTorch: {error}); use the layer that changes it out of place, or a policy that "
                "lets the result be computed again"
            ) from error
