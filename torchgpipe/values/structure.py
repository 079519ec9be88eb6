"""Structures: the containers and other objects that a value consists of besides its tensors.

A value is any nested structure (tuple, list, dict, named tuple, and whatever is registered with
:mod:`torch.utils._pytree`) of tensors and other objects. The engine takes a value apart, works with
its tensors alone, and puts the value together again before a layer is called with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []


# Trees: nested containers are taken apart into leaves, and put together again.
#
# PyTorch's functions for trees would do, but each call of them leaves a reference cycle. Only
# Python's garbage collector frees such cycles, and a step must not have to wait for it.


#: A function that tells whether ``flatten_tree()`` keeps a container whole, as a leaf.
IsLeaf: TypeAlias = Callable[[Any], bool]


class Spec:
    """The containers of a tree without its leaves.

    Args:
        kind: the kind of the outermost container; None for a leaf.
        context: what else PyTorch must know of it, such as the keys of a dict.
        children: the trees that it holds.
    """

    __slots__ = ("children", "context", "count", "kind")

    def __init__(self, kind: Any, context: Any, children: Sequence[Spec]) -> None:
        self.kind, self.context, self.children = kind, context, children
        #: The number of leaves of the tree.
        self.count: int = 1 if kind is None else sum([x.count for x in children])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spec):
            return NotImplemented
        return self is other or (
            self.kind is other.kind
            and bool(self.context == other.context)
            and self.children == other.children
        )

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """The tree with these leaves, in new containers."""
        return _filled(self, [*reversed(leaves)])


LEAF = Spec(None, None, ())


def flatten_tree(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Spec]:
    """Take a tree apart into its leaves, in order, and its containers, unless these are leaves."""
    leaves: list[Any] = []
    return leaves, _flattened(tree, is_leaf, leaves)


def leaves_of(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a tree, in order."""
    return flatten_tree(tree, is_leaf)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """A tree with a function of each leaf in place of the leaf."""
    leaves, spec = flatten_tree(tree, is_leaf)
    return spec.unflatten([*map(function, leaves)])


def _flattened(tree: Any, is_leaf: IsLeaf | None, leaves: list[Any]) -> Spec:
    kind = type(tree)
    if issubclass(kind, Tensor):
        leaves.append(tree)
        return LEAF
    if issubclass(kind, tuple) and kind is not tuple:
        # In PyTorch's table of containers one entry stands for all classes of named tuples.
        kind = _torch.node_type(tree)
    container = _torch.containers.get(kind)
    if container is None or (is_leaf is not None and is_leaf(tree)):
        leaves.append(tree)
        return LEAF
    children, context = container.flatten_fn(tree)
    return Spec(kind, context, [_flattened(x, is_leaf, leaves) for x in children])


def _filled(spec: Spec, rest: list[Any]) -> Any:
    """Build a tree from leaves that it pops off the end of a reversed list."""
    if spec.kind is None:
        return rest.pop()
    children = [_filled(x, rest) for x in spec.children]
    return _torch.containers[spec.kind].unflatten_fn(children, spec.context)


class InputMark:
    """The base of marks, which a caller puts around values in the input of a wrapped model."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def map(self, function: Callable[[Any], Any]) -> InputMark:
        """Apply a function to each leaf; return the results under the same mark."""
        mark = copy(self)
        mark.value = map_leaves(function, self.value)
        return mark

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"


def is_of_input(leaf: Any) -> bool:
    """Whether a leaf is a mark that belongs in the input of a wrapped model."""
    return isinstance(leaf, InputMark)


class Missing:
    """A missing value, or argument, where None is a possible one."""

    def __repr__(self) -> str:
        return "..."


MISSING: Any = Missing()

Tensors: TypeAlias = tuple[Tensor, ...]


class Arguments(NamedTuple):
    """The arguments of a call, as a value."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as a value: the argument itself if there is one only."""
    if not args and kwargs.keys() == {"input"}:
        # nn.Sequential.forward() has one argument, ``input``, which may also be passed by name.
        return kwargs["input"]
    return args[0] if len(args) == 1 and not kwargs else Arguments(args, kwargs)


def equal(a: Any, b: Any) -> bool:
    """Whether two objects are equal; NaN counts as equal to NaN."""
    try:
        return a is b or (type(a) is type(b) and bool(a == b or (a != a and b != b)))
    except Exception:
        # NumPy arrays, for one, count as unequal: ``a == b`` is an array, whose bool() raises.
        return False


class Structure:
    """A value without its tensors."""

    __slots__ = ("others", "spec")

    def __init__(self, spec: Spec | None, others: dict[int, Any]) -> None:
        self.spec = spec
        self.others = others

    def __reduce__(self) -> Any:
        # ALONE and TUPLE are compared by identity, so each must unpickle to the same object.
        for name, known in (("ALONE", ALONE), ("TUPLE", TUPLE)):
            if self is known:
                return name
        assert self.spec is not None
        # The spec is not pickled, since the process that unpickles may have other objects for kinds
        # of containers. It makes the spec anew from the containers, which have zeros as leaves.
        return _restored, (self.spec.unflatten([0] * self.spec.count), self.others)

    def equals(self, other: Structure, equal: Callable[[Any, Any], bool] = equal) -> bool:
        """Whether another structure has the same containers, and equal objects in them."""
        if self is other:
            return True
        return (
            self.spec is not None
            and self.spec == other.spec
            and self.others.keys() == other.others.keys()
            and all(equal(x, other.others[k]) for k, x in self.others.items())
        )

    def unflatten(self, tensors: Tensors) -> Any:
        """The value with these tensors in it, in new containers."""
        if self is ALONE:
            return tensors[0]
        if self is TUPLE:
            return tensors
        assert self.spec is not None
        rest = iter(tensors)
        leaves = [
            self.others[k] if k in self.others else next(rest) for k in range(self.spec.count)
        ]
        return self.spec.unflatten(leaves)


def _restored(containers: Any, others: dict[int, Any]) -> Structure:
    """Rebuild a structure after unpickling, from a value with a number for each leaf."""
    return Structure(flatten_tree(containers)[1], others)


#: Types of most leaves that are no tensors: ``verify_leaf()`` need not look for tensors in them.
ATOMS = frozenset({type(None), bool, int, float, str})

#: The structures of most values: ``ALONE`` of a tensor alone, ``TUPLE`` of a tuple of tensors.
#: Nothing but their identity tells them apart.
ALONE = Structure(None, {})
TUPLE = Structure(None, {})


def flatten(value: Any, spec: Spec | None = None) -> tuple[Tensors, Structure]:
    """Take a value apart into its tensors, in order, and its structure.

    Args:
        value: the value; or its leaves, in a list.
        spec: the containers of the value, where its leaves are given.

    Raises:
        TypeError: the value holds tensors in something that is no known container.
    """
    if spec is LEAF:
        (value,), spec = value, None
    if spec is None:
        if isinstance(value, Tensor):
            return (value,), ALONE
        if type(value) is tuple and value and all(isinstance(x, Tensor) for x in value):
            return value, TUPLE
        value, spec = flatten_tree(value)
    elif spec.kind is tuple or not all(isinstance(x, Tensor) or type(x) in ATOMS for x in value):
        # Built and flattened again, since a tuple of tensors has to become TUPLE, and a leaf, such
        # as a list of rows, may be a container with tensors in it.
        return flatten(spec.unflatten(value))
    others = {k: leaf for k, leaf in enumerate(value) if not isinstance(leaf, Tensor)}
    for leaf in others.values():
        if type(leaf) not in ATOMS:
            verify_leaf(leaf)
    return tuple([leaf for leaf in value if isinstance(leaf, Tensor)]), Structure(spec, others)


def names(value: Any, is_leaf: Callable[[Any], bool] = is_of_input) -> Iterator[tuple[str, Any]]:
    """The leaves of a value, each with the path to it, such as ``[0]['mask']``."""
    if isinstance(value, Tensor):
        yield "the value", value
        return
    try:
        paths = _torch.leaves_with_path(value, is_leaf)
    except ValueError:
        # A container may be registered without names for its entries. Then leaves get numbers.
        leaves = leaves_of(value, is_leaf)
        yield from [(f"leaf {k}", leaf) for k, leaf in enumerate(leaves)]
    else:
        yield from [(_torch.keystr(path).lstrip(".") or "the value", leaf) for path, leaf in paths]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested, so that it has rows and views."""
    return tensor.layout == torch.strided and not tensor.is_nested


def verify_leaf(leaf: Any) -> None:
    """Check that a leaf that is no tensor holds no tensors.

    Raises:
        TypeError: the leaf holds tensors.
    """
    name = type(leaf).__name__
    if is_of_input(leaf):
        raise TypeError(
            f"{name} says what micro-batches get of a value, so it belongs in the input of the "
            "wrapped model, and not within another mark "
            f"({name} of: {type(leaf.value).__name__}); have layers return the value itself"
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
    # A container may hold itself, and would be looked into for ever.
    if id(leaf) in seen:
        return False
    seen.add(id(leaf))
    return any(_holds_tensors(x, seen) for content in contents for x in leaves_of(content))
