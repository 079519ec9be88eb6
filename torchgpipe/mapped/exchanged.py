"""Exchanged: mappings through which modules hand values on to later ones.

Some models call all layers with one object, into which one layer writes keys and values that later
layers read. It must stay the same object, so no layer can get a copy with tensors of its device.
While a module is computed, copies stand in it in place of what is elsewhere. What the module writes
stays, and what was there before comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from torchgpipe.recompute.phase import is_recomputing

__all__: list[str] = []


def mappings_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """The mappings among the arguments of a call that keep their identity, as no dict does."""
    return [
        x
        for x in (*args, *kwargs.values())
        # Most are tensors, and asking for an abstract class takes longer.
        if not isinstance(x, Tensor | dict | tuple) and isinstance(x, MutableMapping)
    ]


class Exchanged:
    """The contents of mappings as one call of a module has them.

    Args:
        mappings: the mappings.
        fetch: brings the tensors of a dict to the device of the module, in another dict.
        lock: held in second runs, which threads of several devices compute at the same time.
    """

    def __init__(
        self,
        mappings: Iterable[MutableMapping[Any, Any]],
        fetch: Callable[[dict[Any, Any]], dict[Any, Any]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._lock = lock
        #: Each mapping, and what the module finds there.
        self._found = [(mapping, fetch({**mapping})) for mapping in mappings]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes the module, for the first or the second time."""
        again = is_recomputing()
        # guard: mappings of several devices
        with self._lock if again else nullcontext():
            before = [{**mapping} for mapping, _ in self._found]
            for mapping, found in self._found:
                _fill(mapping, found)
            try:
                return function(*args, **kwargs)
            finally:
                for (mapping, found), had in zip(self._found, before):
                    # A second run finds the mapping as it was early on, and leaves no trace.
                    if not again:
                        left = {k for k, x in mapping.items() if k in found and x is found[k]}
                        had = {k: had[k] if k in left else x for k, x in mapping.items()}
                    _fill(mapping, had)


def _fill(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    if mapping.keys() - items.keys():
        mapping.clear()
    mapping.update(items)
