"""Trees: nested containers are taken apart into leaves, and put together again.

The containers are those that PyTorch knows: Python's own, and what is registered with
:mod:`torch.utils._pytree`. PyTorch's functions for them would do, but each call creates a reference
cycle. Only Python's garbage collector frees these, and a step must not leave it any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torchgpipe import _torch

__all__: list[str] = []

#: Whether a container shall be a leaf.
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
        #: The number of leaves.
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


def flatten(tree: Any, is_leaf: IsLeaf | None = None) -> tuple[list[Any], Spec]:
    """Take a tree apart into its leaves, in order, and its containers.

    Args:
        tree: the tree.
        is_leaf: tells which containers are leaves, too.
    """
    leaves: list[Any] = []
    return leaves, _flattened(tree, is_leaf, leaves)


def leaves_of(tree: Any, is_leaf: IsLeaf | None = None) -> list[Any]:
    """The leaves of a tree, in order."""
    return flatten(tree, is_leaf)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: IsLeaf | None = None) -> Any:
    """A tree with a function of each leaf in place of the leaf."""
    leaves, spec = flatten(tree, is_leaf)
    return spec.unflatten([*map(function, leaves)])


def _flattened(tree: Any, is_leaf: IsLeaf | None, leaves: list[Any]) -> Spec:
    kind = type(tree)
    if issubclass(kind, tuple) and kind is not tuple:
        # All named tuples are of one kind.
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
