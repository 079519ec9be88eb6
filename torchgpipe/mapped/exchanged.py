"""Values for later modules: in mappings and plain objects, and not in what modules hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from torchgpipe.autograd.versions import version_of
from torchgpipe.mapped.containers import (
    COUNT,
    DEPTH,
    attributes_of,
    handing_back,
    same,
    tensors_of,
    within,
)
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.structure import ATOMS

__all__: list[str] = []


# Some models call all layers with one object, into which one layer writes keys and values that
# later layers read. It must stay the same object, so no layer can get a copy with tensors of its
# device. While a module is computed, copies replace the tensors of other devices in the object.
# Afterwards, values that the module wrote or changed stay, and all others are restored.


def mappings_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Find mappings among the arguments of a call that must stay the same objects; dicts need not.

    The attributes of a plain object that holds tensors are such a mapping, too.
    """
    mappings: dict[int, MutableMapping[Any, Any]] = {}
    _collect((*args, *kwargs.values()), mappings, set(), DEPTH)
    return [*mappings.values()]


def _collect(
    values: Collection[Any],
    mappings: dict[int, MutableMapping[Any, Any]],
    seen: set[int],
    depth: int,
) -> None:
    if len(values) > COUNT:
        return
    for x in values:
        # Checked first, as most values are of these types: isinstance(x, MutableMapping) is slower.
        if isinstance(x, Tensor) or type(x) in ATOMS:
            continue
        inner: Any = x if isinstance(x, dict | list | tuple) else None
        if inner is None and isinstance(x, MutableMapping):
            inner = mappings[id(x)] = x
        elif inner is None:
            inner = attributes_of(x)
            if inner and tensors_of(inner):
                mappings[id(inner)] = inner
        if inner and depth and id(inner) not in seen:
            seen.add(id(inner))
            contents = inner.values() if isinstance(inner, Mapping) else inner
            _collect(contents, mappings, seen, depth - 1)


class Exchanged:
    """The contents of mappings, as one call of a module finds them."""

    def __init__(
        self,
        mappings: Iterable[MutableMapping[Any, Any]],
        fetch: Callable[[dict[Any, Any]], dict[Any, Any]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._lock = lock
        #: Each mapping, and the items that ``call()`` puts into it while the module runs: those
        #: that the mapping had, with their tensors on the module's device.
        self._items = [
            (mapping, {k: _fresh(x) for k, x in fetch({**mapping}).items()}) for mapping in mappings
        ]
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [version_of(x) for _, contents in self._items for x in tensors_of(contents)]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes the module, in forward or in recomputation.

        Raises:
            RuntimeError: a tensor that a recomputation needs was changed in place.
        """
        again = is_recomputing()
        # guard: changes in mappings
        if again and self._versions != self._current_versions():
            raise RuntimeError(
                "under checkpointing, nothing may change in place what a mapping held when a "
                f"module was called with it (mapping: {type(self._items[0][0]).__name__}); write "
                "a new tensor there, or use checkpoint='never'"
            )
        # guard: mappings of several devices
        with self._lock if again else nullcontext():
            before = [{**mapping} for mapping, _ in self._items]
            # New lists and dicts for each run: a recomputation must find them as forward did.
            copies = [{k: _fresh(x) for k, x in contents.items()} for _, contents in self._items]
            handing = handing_back(before, copies)
            for (mapping, _), items in zip(self._items, copies):
                _fill(mapping, items)
            try:
                return function(*args, **kwargs)
            finally:
                # What the module has written into a mapping in forward is handed to later modules
                # by ``handing``. A recomputation only repeats it.
                if not again:
                    for (mapping, _), items in zip(self._items, copies):
                        _fill(items, {**mapping})
                    handing.end()
                for (mapping, _), had in zip(self._items, before):
                    _fill(mapping, had)


def _fill(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    if mapping.keys() - items.keys():
        mapping.clear()
    mapping.update(items)


def _fresh(value: Any) -> Any:
    """Copy the lists and dicts in a value, but not its tensors."""
    if type(value) is dict:
        return {k: _fresh(x) for k, x in value.items()}
    return type(value)(map(_fresh, value)) if type(value) in (list, tuple) else value


# Held: the attributes of modules, which only the modules themselves may change in a step.
#
# Some models hand masks and embeddings down by setting attributes of modules::
#
#   self.block.mask = mask
#   x = self.block(x)
#
# A recomputation of the block, by a checkpoint of PyTorch too, would find the mask of the last
# micro-batch. So the first training step makes it an error to set attributes from outside, in all
# checkpoint modes. A list may grow, since several modules may note in it what they do.


#: ``HeldValues`` ignores attributes that all modules have, and ``forward``, which libraries wrap.
_COMMON = frozenset(vars(nn.Module())) | {"forward"}


class HeldValues:
    """Attributes and buffers that mapped modules hold, from call to call of a step."""

    def __init__(self) -> None:
        #: For each module in a mapped module that was called: the mapped module's name, and, for
        #: each attribute, its value after the latest call, followed by all that the value held.
        self._left: dict[nn.Module, tuple[str, dict[str, list[Any]]]] = {}

    def note(self, name: str, module: nn.Module) -> None:
        """Note what a call of a mapped module has left."""
        self._left |= {inner: (name, _held(inner)) for inner in module.modules()}

    def verify(self, modules: Iterable[nn.Module] | None = None) -> None:
        """Check that modules hold what their last calls have left; by default all modules.

        Raises:
            RuntimeError: they hold something else.
        """
        for module in self._left if modules is None else modules:
            if module not in self._left:
                continue
            (name, left), now = self._left[module], _held(module)
            changed = [key for key in left | now if _differs(left.get(key, []), now.get(key, []))]
            if changed:
                raise RuntimeError(
                    "between calls of a module of a device map nothing must change what the module "
                    "holds as an attribute, or within one: a recomputation would find the last "
                    f"change (module: {name or 'the model'}, attribute: {changed[0]}); pass it as "
                    "an argument, and return what other modules need"
                )


def _differs(left: list[Any], now: list[Any]) -> bool:
    grows = bool(left and now) and type(now[0]) is list
    return not same(left, now[: len(left)] if grows else now)


def _held(module: nn.Module) -> dict[str, list[Any]]:
    attributes = {**vars(module), **module._buffers}
    return {
        key: [x] if type(x) in ATOMS else [x, *within(x)]
        for key, x in attributes.items()
        if key not in _COMMON
    }
