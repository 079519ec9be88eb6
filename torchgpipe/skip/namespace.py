"""Namespaces, which keep the skips of layers of one class apart."""

from __future__ import annotations

import uuid
from typing import TypeAlias

__all__ = ["Namespace"]


class Namespace:
    """A space of names for skips: skips of one name in two namespaces are different skips.

    Layers are put into a namespace by their method ``isolate``. A namespace that was copied or
    pickled stays the same namespace, so that the layers of a copied model find each other.
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Namespace {str(self.id)[:8]}>"


#: A skip: its namespace, None where the layer was not isolated, and its name.
Skip: TypeAlias = tuple[Namespace | None, str]


def describe(skip: Skip) -> str:
    """The name of a skip in messages."""
    namespace, name = skip
    return repr(name) if namespace is None else f"{name!r} in {namespace}"
