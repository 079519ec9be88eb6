"""The choice of what the cells of a partition keep for backward, as a user makes it.

A tensor that layers save for backward has one of three fates: it is kept, computed again, or kept
in the memory of the host. A checkpoint mode chooses, for all cells of a partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias, TypeGuard

from torchgpipe.checks import verify, verify_number

__all__ = ["Offload"]

#: The checkpoint modes that say which micro-batches are computed again; what layers save for all
#: other micro-batches is kept.
CHECKPOINT_MODES = ("always", "except_last", "never")


@dataclass(frozen=True)
class Offload:
    """Keep what layers save for backward in the memory of the host: a checkpoint mode.

    ::

        model = GPipe(layers, balance, chunks=8, checkpoint=Offload(share=0.5))

    The word ``'offload'`` stands for ``Offload()``. What a cell has saved leaves while the next
    cell computes, and comes back while the backward of the cell after it runs. So a step takes as
    long as without, as long as the copy of a cell takes no longer than its forward.

    Args:
        share: the part of the bytes of a cell that leaves, more than 0, and at most 1. What was
            saved first leaves, since backward needs it last.

    Raises:
        TypeError: share is no number.
        ValueError: share is out of range.
    """

    share: float = 1.0

    def __post_init__(self) -> None:
        rule = "share must be the part of a cell's bytes that leaves, above 0 and at most 1"
        remedy = "pass 0.5, for one, or checkpoint='never' if nothing shall leave"
        verify_number(self.share, rule, "share", remedy, above=0)
        verify(self.share <= 1, rule, "share", self.share, remedy)


#: The checkpoint mode that the word 'offload' stands for.
ALL = Offload()

#: A policy of PyTorch's selective checkpointing: ``partial(create_selective_checkpoint_contexts,
#: ...)``, which returns the context managers for forward and for recomputation.
Policy: TypeAlias = Callable[[], tuple[Any, Any]]

#: The types that :func:`is_policy` accepts. Modules and classes can be called, too, but are none.
POLICIES = (partial, FunctionType)

#: A checkpoint mode: what the cells of one partition keep for backward.
Keeping: TypeAlias = str | Offload | Policy

#: One checkpoint mode for all partitions, or a tuple with one for each.
Keepings: TypeAlias = Keeping | tuple[Keeping, ...]


def checked_keeping(checkpoint: object) -> Keeping:
    """Check a checkpoint mode: an :class:`Offload`, a policy, or an object that prints as a word.

    Raises:
        ValueError: there is no such mode.
    """
    if isinstance(checkpoint, Offload) or (is_policy(checkpoint) and _gives_contexts(checkpoint)):
        return checkpoint
    # Members of an enumeration may be strings, but str() of a member begins with its class.
    mode = checkpoint if isinstance(checkpoint, str) else str(checkpoint)
    if mode in (*CHECKPOINT_MODES, "offload"):
        return mode
    raise ValueError(
        "checkpoint must be one of 'always', 'except_last', 'never' and 'offload', an Offload, or "
        f"partial(create_selective_checkpoint_contexts, policy) (checkpoint: {checkpoint!r}); "
        "'except_last' is the default"
    )


def checked_keepings(checkpoint: object, partitions: int | None) -> Any:
    """Check one checkpoint mode for all partitions, or a sequence with one for each.

    The number of partitions is None as long as nobody knows it.

    Raises:
        ValueError: there is no such mode, or there are not as many as partitions.
    """
    if isinstance(checkpoint, str) or not isinstance(checkpoint, Sequence):
        return checked_keeping(checkpoint)
    if partitions is None:
        raise ValueError(
            "an automatic device map must have one checkpoint mode for all of its modules, since "
            f"it chooses them (checkpoint: {[*checkpoint]}); pass one word, such as 'always', and "
            "set model.checkpoint once model.device_map is there"
        )
    modes = tuple(map(checked_keeping, checkpoint))
    if len(modes) != partitions:
        raise ValueError(
            "a list of checkpoint modes must have one for each partition, or for each entry of a "
            f"device map (checkpoint: {[*modes]}, partitions: {partitions}); pass one word for "
            f"all, or ['never'] + ['always'] * {max(0, partitions - 1)} or the like"
        )
    return modes


def checkpointed(mode: str, m: int) -> int:
    """The number of micro-batches, from the first, that a mode computes under checkpointing."""
    return {"always": m, "except_last": max(0, m - 1), "never": 0}[mode]


def keepings_of(modes: Keepings | list[Keeping], partitions: int) -> tuple[Keeping, ...]:
    """The checkpoint mode of each partition."""
    return (*modes,) if isinstance(modes, tuple | list) else (modes,) * partitions


def words_of(modes: Keepings | list[Keeping], partitions: int) -> tuple[str, ...]:
    """The checkpoint mode of each partition, in words."""
    keepings = keepings_of(modes, partitions)
    return tuple(["selective" if is_policy(mode) else str(mode) for mode in keepings])


def is_policy(mode: object) -> TypeGuard[Policy]:
    """Whether a mode is a policy, which names what is not computed again."""
    return isinstance(mode, POLICIES)


def _gives_contexts(policy: Any) -> bool:
    """Whether a policy, called without arguments, returns a context manager for each run."""
    try:
        contexts = policy()
    except TypeError:
        # create_selective_checkpoint_contexts itself is no policy: it needs one as an argument.
        return False
    return isinstance(contexts, tuple) and len(contexts) == 2


def choosing(modes: tuple[Keeping, ...]) -> tuple[Keeping, ...]:
    """The modes, if any of them is a policy or offloads; otherwise nothing."""
    return () if {*modes} <= {*CHECKPOINT_MODES} else modes


def recomputed_by(mode: Keeping) -> str:
    """The word for the cells that a mode computes again: ``'never'`` if it offloads them."""
    if mode == "offload" or isinstance(mode, Offload):
        return "never"
    return mode if isinstance(mode, str) else "always"


def policy_of(mode: Keeping) -> Policy | None:
    """The policy that a mode is, if it is one."""
    return mode if is_policy(mode) else None


def offload_of(mode: Keeping) -> Offload | None:
    """The way in which a mode sends tensors to the host; None if it sends none."""
    return ALL if mode == "offload" else mode if isinstance(mode, Offload) else None


def counted(mode: Keeping) -> str:
    """The mode by which a plan counts what cells keep: ``'never'`` for a policy, and offloading.

    Both keep less than ``'never'``, and nobody knows how much less before the cells run.
    """
    return mode if isinstance(mode, str) and mode in CHECKPOINT_MODES else "never"


def verify_words(modes: tuple[Keeping, ...], what: str, remedy: str) -> None:
    """Refuse modes that choose among saved tensors, for what does not see each of them.

    Raises:
        ValueError: there is such a mode.
    """
    others = [x for x in words_of(modes, 1) if x not in CHECKPOINT_MODES]
    rule = f"{what} keeps all that a cell saves, or computes it again"
    verify(not others, rule, "checkpoint", others, remedy)
