"""Namespaces, which keep the skips of layers of one class apart."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Namespace"]


@dataclass(frozen=True)
class Namespace:
    """A space of names for skips: skips of one name in two namespaces are different skips.

    Layers are put into a namespace by their method ``isolate``. A namespace that was copied or
    pickled stays the same namespace, so that the layers of a copied model find each other.
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {str(self.id)[:8]}>"


#: A skip: its namespace, None where the layer was not isolated, and its name.
Skip: TypeAlias = tuple[Namespace | None, str]


def describe(skip: Skip) -> str:
    """The name of a skip in messages."""
    namespace, name = skip
    return repr(name) if namespace is None else f"{name!r} in {namespace}"
