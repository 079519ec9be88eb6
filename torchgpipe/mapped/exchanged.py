"""Values that the model leaves for later modules: in attributes, mappings and plain objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import is_, itemgetter
from traceback import walk_stack
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from torchgpipe.autograd.halves import is_checkpointed
from torchgpipe.autograd.nodes import next_number, number_of
from torchgpipe.autograd.versions import version_of
from torchgpipe.mapped.containers import (
    COUNT,
    DEPTH,
    Contents,
    Replaced,
    attributes_of,
    fill,
    handing_back,
    tensors_of,
)
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.structure import ATOMS, MISSING

__all__: list[str] = []


# Exchanged: mappings and plain objects by which modules pass values to later modules.
#
# Some models call all layers with one object, into which one layer writes keys and values that
# later layers read. It must stay the same object, so no layer can get a copy with tensors of its
# device. While a module is computed, tensors of other devices in it are replaced by copies.
# Afterwards, values that the module wrote or changed stay, and all others are restored.


def mappings_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Find mappings among the arguments of a call that must stay the same objects; dicts need not.

    The attributes of a plain object that holds tensors are such a mapping, too.
    """
    found: dict[int, MutableMapping[Any, Any]] = {}
    _collect((*args, *kwargs.values()), found, set(), DEPTH)
    return [*found.values()]


def _collect(
    values: Collection[Any],
    found: dict[int, MutableMapping[Any, Any]],
    seen: set[int],
    depth: int,
) -> None:
    if len(values) > COUNT:
        return
    for x in values:
        # Most are tensors, and isinstance() with an abstract class takes longer.
        if isinstance(x, Tensor) or type(x) in ATOMS:
            continue
        inner: Any = x if isinstance(x, dict | list | tuple) else None
        if inner is None and isinstance(x, MutableMapping):
            inner = found[id(x)] = x
        elif inner is None:
            inner = attributes_of(x)
            if inner and tensors_of(inner):
                found[id(inner)] = inner
        if inner and depth and id(inner) not in seen:
            seen.add(id(inner))
            within = inner.values() if isinstance(inner, Mapping) else inner
            _collect(within, found, seen, depth - 1)


class Exchanged:
    """The contents of mappings, as one call of a module finds them.

    Args:
        mappings: the mappings.
        fetch: brings the tensors of a dict to the device of the module, in another dict.
        lock: held in recomputations, which threads of several devices compute at the same time.
    """

    def __init__(
        self,
        mappings: Iterable[MutableMapping[Any, Any]],
        fetch: Callable[[dict[Any, Any]], dict[Any, Any]],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._lock = lock
        #: Each mapping, and what the module finds there.
        self._found = [
            (mapping, {k: _fresh(x) for k, x in fetch({**mapping}).items()}) for mapping in mappings
        ]
        self._versions = self._versions_of_found()

    def _versions_of_found(self) -> list[int]:
        return [version_of(x) for _, found in self._found for x in tensors_of(found)]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that computes the module, in forward or in recomputation.

        Raises:
            RuntimeError: a tensor that a recomputation needs was changed in place.
        """
        again = is_recomputing()
        # guard: changes in mappings
        if again and self._versions != self._versions_of_found():
            raise RuntimeError(
                "under checkpointing, nothing may change in place what a mapping held when a "
                f"module was called with it (mapping: {type(self._found[0][0]).__name__}); write "
                "a new tensor there, or use checkpoint='never'"
            )
        # guard: mappings of several devices
        with self._lock if again else nullcontext():
            before = [{**mapping} for mapping, _ in self._found]
            # New containers in each run, so that recomputation finds them unchanged.
            given = [{k: _fresh(x) for k, x in found.items()} for _, found in self._found]
            handing = handing_back(before, given)
            for (mapping, _), items in zip(self._found, given):
                _fill(mapping, items)
            try:
                return function(*args, **kwargs)
            finally:
                # Recomputation restores the mapping entirely.
                if not again:
                    for (mapping, _), items in zip(self._found, given):
                        _fill(items, {**mapping})
                    handing.end()
                for (mapping, _), had in zip(self._found, before):
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


# Attributes that the model's code sets on a mapped module, anew for each micro-batch.
#
# Many models hand masks and embeddings down in this way::
#
#   self.block.mask = mask
#   x = self.block(x)
#
# When the block is recomputed, the attribute has the value of the last micro-batch. So attributes
# that change between two calls of a module are set again for its recomputation. Attributes that
# the module itself changes are not, as under every wrapper.
#
# The first step also looks into lists, dicts and plain objects among the attributes. From then on
# only those are looked into that the model's code has changed between calls.


#: Attributes of every module: flags and dicts, which are restored by other means.
_COMMON = frozenset(vars(nn.Module()))

#: The module whose checkpoints compute once more in backward what they have around them.
CHECKPOINT = "torch.utils.checkpoint"

#: The index of a module among those within a mapped module, and the name of an attribute.
Key: TypeAlias = tuple[int, str]


class AttributesThen(NamedTuple):
    """A reading of all attributes, at one time."""

    keys: Sequence[Key]
    values: Sequence[Any]
    #: The contents of the attributes that are looked into.
    contents: Mapping[Key, Contents]

    def by_key(self) -> dict[Key, Any]:
        """The values by key."""
        return dict(zip(self.keys, self.values))


class Attributes:
    """The attributes of a mapped module, and of all modules within, from call to call.

    Each call of a mapped module reads all of them twice. To take less time, loops run in C where
    they can, and an equal reading is the same object.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        #: The attributes that change between calls.
        self._given: dict[Key, None] = {}
        #: The attributes whose contents change between calls.
        self._deep: dict[Key, None] = {}
        #: Whether the contents of all attributes are looked into.
        self.learns = True
        #: The number of autograd's next node when the last call began.
        self._number = 0
        #: The readings before and after the last call of a step.
        self._last: CallAttributes | None = None
        self._left: AttributesThen | None = None
        self._walk()

    def begin_step(self) -> None:
        """List the attributes anew if the module has other submodules now."""
        children = [x for table in self._tables for x in table["_modules"].values()]
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            self._walk()

    def end_step(self, m: int) -> None:
        """Find the last changes of a step, and release all readings.

        Args:
            m: the number of micro-batches. A single one does not show whether contents change.
        """
        self._look()
        self.learns = self.learns and m == 1
        self.let_go()

    def let_go(self) -> None:
        """Release all values of attributes."""
        self._last = self._left = None

    def begin(self) -> CallAttributes:
        """Read the attributes before a call."""
        found, last = self._look(), self._last
        self._number = next_number()
        self._left = found
        if last is None or found is not last.found:
            last = self._last = CallAttributes(self._tables, self._given, self._deep, found)
        return last

    def end(self, given: CallAttributes, module: str, output: Any) -> None:
        """Read the attributes after a call of a module.

        Raises:
            RuntimeError: the first step shows tensors that the model stores on the module for each
                micro-batch, and that a checkpoint of PyTorch may read there in backward.
        """
        self._left = self._unless(given.found)
        if self.learns and (self._given or self._deep):
            found, left = given.found.by_key(), self._left.by_key()
            for key in (*self._given, *self._deep):
                # What the call itself sets, as hooks of weight norms do, its recomputation sets.
                value = found.get(key) if found.get(key) is left.get(key) else None
                within = Contents.of(value)
                values = [value, *chain(*[x for _, x in within.found])] if within else [value]
                if tensors_of(values) and self._is_checkpointed(output):
                    raise RuntimeError(
                        "a model must not store tensors for each micro-batch on a module that "
                        "computes in torch.utils.checkpoint, whose recomputation in backward finds "
                        f"those of the last one (module: {module}, attribute: {key[1]}); pass "
                        "them as arguments, or use this wrapper's checkpoints alone"
                    )

    def _is_checkpointed(self, output: Any) -> bool:
        """Whether a checkpoint of PyTorch is around the last call, or within it."""
        if any(x.f_globals.get("__name__") == CHECKPOINT for x, _ in walk_stack(None)):
            return True
        waiting = [x.grad_fn for x in tensors_of((output,))]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen and number_of(node) >= self._number:
                if type(node).__name__ == "CheckpointFunctionBackward" or is_checkpointed(node):
                    return True
                seen.add(node)
                waiting += [x for x, _ in node.next_functions]
        return False

    def _look(self) -> AttributesThen:
        """Find the attributes that changed since the last call; return the present reading."""
        left = self._left
        found = self._unless(left)
        if left is not None and found is not left:
            now, before = found.by_key(), left.by_key()
            for key in now | before:
                if now.get(key, MISSING) is not before.get(key, MISSING):
                    self._given[key] = None
        if left is not None and left.contents:
            self._deep |= {key: None for key, x in left.contents.items() if x.is_changed}
        return found

    def _walk(self) -> None:
        modules = [*self._module.modules()]
        # Of PyTorch's classes alone: in a user's class, ``__constants__`` may name anything.
        self._sizes_of = [
            getattr(type(x), "__constants__", ()) if type(x).__module__[:6] == "torch." else ()
            for x in modules
        ]
        self._tables = [*map(vars, modules)]
        self._children = [x for table in self._tables for x in table["_modules"].values()]
        self._given.clear()
        self._deep.clear()
        self.learns = True
        self._list()

    def _unless(self, known: AttributesThen | None) -> AttributesThen:
        """Read all attributes; return ``known`` itself if it is equal."""
        values = self._values()
        # Without comparing objects: tensors on an accelerator would make the host wait.
        if (
            known is not None
            and self._keys is known.keys
            and all(map(is_, values, known.values))
            and not (known.contents and any(x.is_changed for x in known.contents.values()))
        ):
            return known
        return AttributesThen(self._keys, values, self._contents(values))

    def _contents(self, values: Sequence[Any]) -> dict[Key, Contents]:
        """Look into attributes."""
        if not self.learns and not self._deep:
            return {}
        found = {
            key: Contents.of(value)
            for key, value in zip(self._keys, values)
            if self.learns or key in self._deep
        }
        return {key: x for key, x in found.items() if x is not None}

    def _values(self) -> list[Any]:
        if [*map(len, self._tables)] != self._sizes:
            self._list()
        try:
            return [x for get, own in self._getters for x in get(own)]
        except KeyError:
            # One attribute was deleted, and another one was added.
            self._list()
            return [x for get, own in self._getters for x in get(own)]

    def _list(self) -> None:
        """List the attributes that there are."""
        self._sizes = [*map(len, self._tables)]
        self._keys: list[Key] = []
        self._getters: list[tuple[itemgetter[Any], dict[str, Any]]] = []
        for k, (sizes, table) in enumerate(zip(self._sizes_of, self._tables)):
            # Without the sizes of a layer, but with floats, such as probabilities.
            names = [
                name
                for name, value in table.items()
                if name not in _COMMON and not (name in sizes and isinstance(value, int | tuple))
            ]
            if len(names) == 1:
                # For a single name, itemgetter() would return no tuple.
                names *= 2
            if names:
                self._keys += [(k, name) for name in names]
                self._getters.append((itemgetter(*names), table))


class CallAttributes(NamedTuple):
    """The attributes that one call of a module has found."""

    tables: Sequence[dict[str, Any]]
    #: The attributes that change between calls, which later calls may add to.
    keys: Mapping[Key, None]
    #: The attributes whose contents change between calls.
    deep: Mapping[Key, None]
    found: AttributesThen


class RestoredAttributes:
    """Set the attributes that a call has found within a ``with`` block; put the others back."""

    def __init__(self, given: CallAttributes) -> None:
        self._given = given
        self._before: list[tuple[dict[str, Any], str, Any]] = []
        self._filled: list[Replaced] = []

    def __enter__(self) -> None:
        tables, keys, deep, found = self._given
        values = found.by_key() if keys else {}
        for k, name in keys:
            table, value = tables[k], values.get((k, name), MISSING)
            now = table.get(name, MISSING)
            # guard: attributes of a call
            if now is not value:
                self._before.append((table, name, now))
                _put(table, name, value)
        for key in deep:
            if key in found.contents:
                self._filled += found.contents[key].put()

    def __exit__(self, *_: object) -> None:
        for replaced in reversed(self._filled):
            fill(*replaced)
        for table, name, value in self._before:
            _put(table, name, value)


def _put(table: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        table.pop(name, None)
    else:
        table[name] = value
