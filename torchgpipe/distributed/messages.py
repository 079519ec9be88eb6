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

import pickle
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.skip.namespace import describe
from torchgpipe.values.microbatch import VALUE, Part
from torchgpipe.values.structure import ATOMS, Structure, equal

__all__: list[str] = []


class Meta(NamedTuple):
    """All of a tensor but its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    def __repr__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}{' with a gradient' * self.requires_grad}"


class Packed(NamedTuple):
    """The form of one part: the value, or a skip."""

    key: Any
    structure: Structure
    #: For each tensor of the part, its number among the different ones.
    places: tuple[int, ...]
    metas: tuple[Meta, ...]

    def __repr__(self) -> str:
        metas: Any = tuple([self.metas[k] for k in self.places])
        value = self.structure.unflatten(metas)
        return repr(value) if self.key is VALUE else f"skip {describe(self.key)}: {value!r}"


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
            and all(x.structure.equals(y.structure, alike) for x, y in zip(self.parts, other.parts))
        )

    def difference(self, other: Form) -> tuple[str, str]:
        """Texts of both forms, which are not alike, that tell the first difference."""
        for one, two in zip(self.parts, other.parts):
            if repr(one) != repr(two):
                return repr(one), repr(two)
        if self.shared != other.shared:
            return _sharing(self), _sharing(other)
        for one, two in zip(self.parts, other.parts):
            if one.places != two.places:
                return (
                    f"{one!r}, tensors by place {[*one.places]}",
                    f"{two!r}, tensors by place {[*two.places]}",
                )
        texts = ", ".join(map(repr, self.parts))
        return texts, f"{texts}, where an object differs that prints alike"


def alike(a: Any, b: Any) -> bool:
    """Whether two objects in a message are equal, or have the same content."""
    if equal(a, b):
        return True
    # Classes without a way to compare, of which a layer may make an object each time.
    return type(a) is type(b) and type(a) not in ATOMS and _content(a) == _content(b)


class _Pickler(pickle.Pickler):
    """A pickler for comparisons: the pickle of a tensor itself has the address of its memory."""

    def persistent_id(self, x: Any) -> Any:
        return (x.shape, str(x.dtype), x.tolist()) if isinstance(x, Tensor) else None


def _content(x: Any) -> bytes:
    file = BytesIO()
    _Pickler(file).dump(x)
    return file.getvalue()


def _sharing(form: Form) -> str:
    parts = [part for part in form.parts if part.key in form.shared]
    return f"{', '.join(map(repr, parts)) or 'nothing'} that shares memory with other parts"


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
