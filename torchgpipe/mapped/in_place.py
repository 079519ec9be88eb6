"""Functions of PyTorch that change one of their arguments in place, by their names."""

from __future__ import annotations

__all__: list[str] = []

#: Functions that change statistics, which are the second argument.
STATISTICS = frozenset({"batch_norm", "instance_norm"})


def is_in_place(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")
