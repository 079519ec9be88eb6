"""Selective checkpoints from within: the policy that a mode of PyTorch's asks, and what it keeps.

Attributes of PyTorch's private classes have no entry in the table of names. So they stand here, and
where one is missing, a policy does what PyTorch alone does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []


def is_known(mode: Any) -> bool:
    """Whether a context manager is PyTorch's mode for a first run, with all that is used here."""
    known = hasattr(mode, "policy_fn") and hasattr(mode, "storage")
    return known and isinstance(mode, _torch.KeepingMode)


def ask(mode: Any, judge: Callable[..., Any]) -> None:
    """Have a mode ask a function, which gets the mode's own policy first.

    Before PyTorch 2.13 the mode of the recomputation asks, too; from then on it does not.
    """
    policy = getattr(mode, "policy_fn", None)
    if policy is not None:

        def asked(*args: Any, **kwargs: Any) -> Any:
            return judge(policy, *args, **kwargs)

        mode.policy_fn = asked


def results_of(mode: Any) -> Any:
    """The table of results that a mode keeps. It does not refer to the mode."""
    return mode.storage


def kept_by(results: Any, operator: Any) -> list[Any]:
    """The results of an operator in a first run, in order; those that are kept have entries."""
    found = results.get(operator, ())
    return [*(found.values() if isinstance(found, dict) else found)]


def unchanged(entry: Any) -> Tensor | None:
    """The tensor of an entry, if it is one that nobody has changed in place since."""
    found = isinstance(entry.val, Tensor) and entry.val._version == entry.version
    return entry.val if found else None


def replace(entry: Any, value: Any, version: int) -> None:
    """Put something else into an entry, with the version that the mode shall find."""
    entry.val, entry.version = value, version
