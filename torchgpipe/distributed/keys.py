"""Keys of a state dict: those of the plain module, of a GPipe, and of layers of other processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

__all__: list[str] = []


def keep_own(state_dict: dict[str, Any], prefix: str, others: Collection[str]) -> None:
    """Give the keys of a GPipe the plain module's names, and drop those of other processes.

    Args:
        state_dict: the state dict, which is changed.
        prefix: what the keys of the pipeline start with.
        others: the names of the layers of other processes.
    """
    for key in [*state_dict]:
        if key.startswith(prefix):
            path = key[len(prefix) :].split(".")
            if path[0] == "partitions" and len(path) > 2 and path[1].isdecimal():
                path = path[2:]
                state_dict[prefix + ".".join(path)] = state_dict.pop(key)
            if path[0] in others:
                del state_dict[prefix + ".".join(path)]
