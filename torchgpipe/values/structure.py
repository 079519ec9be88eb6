"""Structures: what values are made of besides their tensors.

A value is any nested structure (tuple, list, dict, named tuple, and whatever is registered with
:mod:`torch.utils._pytree`) of tensors and other objects. It is taken apart into its tensors, which
is all that the rest sees, and put together again around them where a layer wants it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["NoChunk"]

Tensors: TypeAlias = tuple[Tensor, ...]


class NoChunk:
    """Marks what every micro-batch gets whole: ``model(input, NoChunk(mask))``.

    It may be anywhere in the input of a wrapped model. Layers see the value itself.

    Args:
        value: a tensor, or a nested structure of tensors. It must not be changed in place.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"NoChunk({self.value!r})"


class Arguments(NamedTuple):
    """The arguments of a call, as a value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments as a value: the argument itself, if there is but one."""
    if not args and kwargs.keys() == {"input"}:
        # What the forward of an nn.Sequential calls it.
        return kwargs["input"]
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


class Structure:
    """A value without its tensors.

    Args:
        spec: the containers; None for a tensor alone.
        others: what is no tensor, by its index among the leaves.
    """

    __slots__ = ("others", "spec")

    def __init__(self, spec: TreeSpec | None, others: dict[int, Any]) -> None:
        self.spec = spec
        self.others = others

    def unflatten(self, tensors: Tensors) -> Any:
        """The value with these tensors in it; containers are new ones."""
        if self is ALONE:
            return tensors[0]
        if self is TUPLE:
            return tensors
        assert self.spec is not None
        rest = iter(tensors)
        leaves = [
            self.others[k] if k in self.others else next(rest) for k in range(self.spec.num_leaves)
        ]
        return tree_unflatten(leaves, self.spec)


#: What most others are: nothing to look into.
ATOMS = frozenset({type(None), bool, int, float, str})

#: A tensor alone, and a tuple of nothing but tensors: what most values are.
ALONE = Structure(None, {})
TUPLE = Structure(None, {})


def flatten(value: Any) -> tuple[Tensors, Structure]:
    """Takes a value apart: its tensors in order, and the rest.

    Raises:
        TypeError: it holds tensors that could not be found by those who look for them.
    """
    if isinstance(value, Tensor):
        return (value,), ALONE
    if type(value) is tuple and value and all(isinstance(x, Tensor) for x in value):
        return value, TUPLE
    leaves, spec = tree_flatten(value)
    others = {k: leaf for k, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    for leaf in others.values():
        if type(leaf) not in ATOMS:
            verify_leaf(leaf)
    return tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)]), Structure(spec, others)


def names(value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a value, each with the way to it, such as ``[0]['mask']``."""
    try:
        found = tree_flatten_with_path(value, _is_whole)[0]
    except ValueError:
        # Registered without names.
        yield from [(f"leaf {k}", leaf) for k, leaf in enumerate(tree_leaves(value, _is_whole))]
    else:
        yield from [(keystr(path).lstrip(".") or "the value", leaf) for path, leaf in found]


def split(value: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Splits a value along dimension 0 of its tensors; the rest goes into every part, whole.

    Args:
        value: a structure, with :class:`NoChunk` anywhere.
        sizes: how many rows each part has, in order.
    """
    leaves, spec = tree_flatten(value, _is_whole)
    rows = {id(x): x for x in leaves if is_split(x) and is_dense(x)}
    aliases: dict[int, Tensor] = {}

    def alias(x: Tensor) -> Tensor:
        # Its gradients are added up on the caller's stream and in memory of that, as those of rows
        # are, and not on that of whoever comes first: the derivative of narrow() is a new tensor.
        if not (x.requires_grad and is_dense(x)):
            return x
        if id(x) not in aliases:
            aliases[id(x)] = x.unsqueeze(0).narrow(0, 0, 1).squeeze(0)
        return aliases[id(x)]

    whole = [
        x if is_split(x) else tree_map_only(Tensor, alias, x.value if _is_whole(x) else x)
        for x in leaves
    ]
    start = 0
    for size in sizes:
        # narrow() and not split(), whose views may not be changed in place. One tensor in several
        # places stays one.
        parts = {key: _rows(x, start, size) for key, x in rows.items()}
        start += size
        yield tree_unflatten([parts.get(id(x), other) for x, other in zip(leaves, whole)], spec)


def _rows(tensor: Tensor, start: int, size: int) -> Tensor:
    # No view, where no gradient comes back: PyTorch's compiler would make a graph for each base.
    rows = tensor.narrow(0, start, size)
    return rows if rows.requires_grad or forward_ad._current_level >= 0 else rows.detach()


def is_split(leaf: Any) -> bool:
    """Whether a leaf has rows, of which each micro-batch gets its own."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0


def is_dense(tensor: Tensor) -> bool:
    """Whether rows can be taken from a tensor, as they cannot from sparse and nested ones."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, NoChunk)


def verify_leaf(leaf: Any) -> None:
    """Checks that what is no tensor, and no known container, holds no tensors.

    Raises:
        TypeError: it does.
    """
    name = type(leaf).__name__
    if _is_whole(leaf):
        raise TypeError(
            "NoChunk marks what every micro-batch gets whole, so it belongs in the input of the "
            f"wrapped model (NoChunk of: {type(leaf.value).__name__}); have layers return the "
            "value itself"
        )
    if _holds_tensors(leaf, set()):
        remedy = (
            f"call torch.export.register_dataclass({name})"
            if is_dataclass(leaf)
            else f"call torch.utils._pytree.register_pytree_node({name}, ...)"
        )
        raise TypeError(
            "what holds tensors must be known to PyTorch as a container, since they are split "
            f"into micro-batches and moved from device to device (class: {name}); {remedy} once, "
            "or pass a tuple, a list or a dict"
        )


def _holds_tensors(leaf: Any, seen: set[int]) -> bool:
    if isinstance(leaf, Tensor):
        return True
    contents: Iterable[Any]
    if is_dataclass(leaf) and not isinstance(leaf, type):
        contents = [getattr(leaf, field.name, None) for field in fields(leaf)]
    elif isinstance(leaf, dict):
        contents = leaf.values()
    elif isinstance(leaf, tuple | list | set | frozenset):
        contents = leaf
    else:
        return False
    # It may hold itself.
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    return any(_holds_tensors(x, seen) for content in contents for x in tree_leaves(content))
