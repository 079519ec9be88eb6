"""Namespaces: layers of one class, several times in a model, keep their skips apart."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Namespace"]


@dataclass(frozen=True)
class Namespace:
    """Keeps skips of one name apart: see :meth:`Skippable.isolate`.

    Copies of a namespace, and what is unpickled of it, are the same namespace, so that the layers
    of a copied model find each other.
    """

    id: uuid.UUID = field(default_factory=uuid.uuid4, init=False)

    def __repr__(self) -> str:
        return f"<Namespace {str(self.id)[:8]}>"


#: A skip: its namespace, None where the layer was not isolated, and its name.
Skip: TypeAlias = tuple[Namespace | None, str]


def describe(skip: Skip) -> str:
    """The skip as messages name it."""
    namespace, name = skip
    return repr(name) if namespace is None else f"{name!r} in {namespace}"
