"""Messages: what passes between two stages in two processes, as a list of tensors and a form.

::

    value, skips  ── pack ──→  form     the containers, shapes and dtypes: sent once for each shape
                               tensors  sent each time
    value, skips  ←─ unpack ── both

A runtime that sends tensors needs to know their shapes before they arrive. PyTorch's own finds them
by running all stages on memory that nobody has written. Here the sender says what it sends, in
front of the first message of each shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.values.microbatch import Part
from torchgpipe.values.structure import Structure

__all__: list[str] = []


class Meta(NamedTuple):
    """All of a tensor but its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class Packed(NamedTuple):
    """The form of one part: the value, or a skip."""

    key: Any
    structure: Structure
    #: For each tensor of the part, its number among the different ones.
    places: tuple[int, ...]
    metas: tuple[Meta, ...]


class Form(NamedTuple):
    """The form of a message.

    Args:
        parts: the parts, in order.
        shared: the keys of those that share memory with another part where they come from.
    """

    parts: tuple[Packed, ...]
    shared: frozenset[Any]

    @property
    def metas(self) -> list[Meta]:
        """The shape, the dtype and the need of a gradient of each tensor."""
        return [meta for part in self.parts for meta in part.metas]

    def renamed(self, names: Mapping[Any, Any]) -> Form:
        """The same form with other keys."""
        parts = tuple([part._replace(key=names[part.key]) for part in self.parts])
        return Form(parts, frozenset(names[key] for key in self.shared))

    def is_like(self, other: Form) -> bool:
        """Whether messages of both forms look alike."""
        return (
            self.shared == other.shared
            and [(x.key, x.places, x.metas) for x in self.parts]
            == [(x.key, x.places, x.metas) for x in other.parts]
            and all(x.structure.equals(y.structure) for x, y in zip(self.parts, other.parts))
        )


def pack(parts: Mapping[Any, Part], shared: frozenset[Any]) -> tuple[Form, list[Tensor]]:
    """Take the parts of a micro-batch apart.

    Args:
        parts: the parts, by their keys.
        shared: the keys of parts that share memory.
    """
    forms, tensors = [], []
    for key, part in parts.items():
        numbers: dict[int, int] = {}
        found: list[Tensor] = []
        for x in part.tensors:
            # guard: one tensor is sent once
            if id(x) not in numbers:
                numbers[id(x)] = len(found)
                found.append(x)
        metas = tuple([Meta(x.shape, x.dtype, x.requires_grad) for x in found])
        places = tuple([numbers[id(x)] for x in part.tensors])
        forms.append(Packed(key, part.structure, places, metas))
        tensors += found
    return Form(tuple(forms), shared), tensors


def unpack(form: Form, tensors: Sequence[Tensor]) -> dict[Any, Part]:
    """Put the parts of a micro-batch together.

    Args:
        form: the form of the message.
        tensors: its tensors, in order; those that a gradient is wanted of will require one.
    """
    found = {}
    rest = iter(tensors)
    for part in form.parts:
        own = [next(rest).requires_grad_(meta.requires_grad) for meta in part.metas]
        found[part.key] = Part(tuple([own[k] for k in part.places]), part.structure)
    return found
