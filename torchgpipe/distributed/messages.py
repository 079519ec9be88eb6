"""Messages: what passes between two stages in two processes, as a list of tensors and a form.

::

    value, skips  ── pack ──→  form     the containers, shapes and dtypes: sent once for each shape
                               tensors  sent each time
    value, skips  ←─ unpack ── both

A runtime that sends tensors needs to know their shapes before they arrive. PyTorch's own finds them
by running all stages on memory that nobody has written. Here the sender says what it sends, in
front of the first message of each shape. Gradients have the form of what they belong to.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.peers import Routes
from torchgpipe.skip.tracker import describe
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.structure import ATOMS, Structure, equal

__all__: list[str] = []

#: The most values of ``shapes`` (see :meth:`Forms.begin`) for which :class:`Forms` keeps forms.
MOST = 100


class Meta(NamedTuple):
    """All of a tensor but its values."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


class Packed(NamedTuple):
    """The form of one part: the value, or a skip."""

    key: Any
    structure: Structure
    #: For each tensor of the value or skip, its index in ``metas``, where each tensor is once.
    places: tuple[int, ...]
    metas: tuple[Meta, ...]
    #: Whether the value or skip shares memory with other tensors of the sending process.
    is_shared: bool

    def is_like(self, other: Packed) -> bool:
        """Whether messages of both forms look alike."""
        return (
            self[2:] == other[2:]
            and self.key == other.key
            and self.structure.equals(other.structure, alike)
        )

    def __str__(self) -> str:
        name = "value" if self.key is VALUE else f"skip {describe(self.key)}"
        return f"{name} of shapes {[tuple(self.metas[k].shape) for k in self.places]}"


@dataclass(frozen=True)
class Form:
    """The form of a message."""

    parts: tuple[Packed, ...]

    # Cached, since one form serves for many messages.
    @cached_property
    def metas(self) -> list[Meta]:
        """The shape, the dtype and the need of a gradient of each tensor."""
        return [meta for part in self.parts for meta in part.metas]

    @cached_property
    def back(self) -> list[Meta]:
        """The metas of the tensors whose gradients come back."""
        return [meta for meta in self.metas if meta.requires_grad]

    @cached_property
    def shared(self) -> frozenset[Any]:
        """The keys of parts that share memory with another one in the sending process."""
        return frozenset(part.key for part in self.parts if part.is_shared)

    def renamed(self, names: Mapping[Any, Any]) -> Form:
        """The same form with other keys."""
        return Form(tuple([part._replace(key=names[part.key]) for part in self.parts]))


def alike(a: Any, b: Any) -> bool:
    """Whether two objects in a message are equal, or have the same content."""
    if equal(a, b):
        return True
    # An object without __eq__ that a layer makes anew each time equals no other object. So the
    # contents are compared, as bytes.
    return type(a) is type(b) and type(a) not in ATOMS and pickle.dumps(a) == pickle.dumps(b)


def pack(batch: Batch) -> tuple[Form, list[Tensor]]:
    """Take a micro-batch apart."""
    forms, tensors = [], []
    for key, part in batch.parts.items():
        numbers: dict[int, int] = {}
        distinct: list[Tensor] = []
        for x in part:
            # guard: one tensor is sent once
            if id(x) not in numbers:
                numbers[id(x)] = len(distinct)
                distinct.append(x)
        metas = tuple([Meta(x.shape, x.dtype, x.requires_grad) for x in distinct])
        places = tuple([numbers[id(x)] for x in part])
        forms.append(Packed(key, batch.structures[key], places, metas, key in batch.shared))
        tensors += distinct
    return Form(tuple(forms)), tensors


def unpack(form: Form, tensors: Sequence[Tensor]) -> Batch:
    """Put a micro-batch together."""
    parts, structures = {}, {}
    rest = iter(tensors)
    for part in form.parts:
        distinct = [next(rest).requires_grad_(meta.requires_grad) for meta in part.metas]
        parts[part.key] = tuple([distinct[k] for k in part.places])
        structures[part.key] = part.structure
    # guard: skips that share memory elsewhere
    return Batch.of(parts, structures, form.shared)


class Forms:
    """The forms that both ends of the messages of this process know."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        #: The forms that were sent or received, by the ``shapes`` of the step (see :meth:`begin`),
        #: the stage that receives, and the micro-batch's entry in ``rows``.
        self._known: dict[tuple[Any, int, int], Form] = {}
        #: The ``shapes`` of all steps whose forms are in ``_known``.
        self._seen: set[Any] = set()

    def begin(self, shapes: Any, rows: Sequence[int]) -> None:
        """Begin a step.

        Args:
            shapes: stands for all that the shapes of messages depend on, in all processes.
            rows: the rows of each micro-batch.
        """
        if shapes not in self._seen and len(self._seen) == MOST:
            # Both ends of a message see the same ``shapes``, so they forget its form in one step.
            self._seen.clear()
            self._known.clear()
        self._seen.add(shapes)
        self._shapes, self._rows = shapes, rows

    def known(self, j: int, i: int) -> Form:
        """The form of what stage ``j`` is sent of micro-batch ``i``, which somebody has told."""
        return self._known[self._shapes, j, self._rows[i]]

    def get(self, j: int, i: int) -> Form | None:
        """The form of what stage ``j`` is sent of micro-batch ``i``; None if nobody has told it."""
        return self._known.get((self._shapes, j, self._rows[i]))

    def told(self, j: int, i: int, form: Form) -> Tensor | None:
        """The bytes that describe to the receiver the structure of what is sent to stage ``j``.

        Returns:
            The bytes; None if the receiver has them already.

        Raises:
            TypeError: something in the structure cannot be sent to another process.
            ValueError: the receiver was told another structure for micro-batches of as many rows.
        """
        known = self.get(j, i)
        if known is None:
            data = _pickled(form.renamed(self._routes.names), j - 1)
            # A copy of the form is remembered, since a layer may change objects in ``form`` itself.
            self.read(j, i, data)
            return data
        for announced, sent in zip(known.parts, form.parts):
            if announced.is_like(sent):
                continue
            raise ValueError(
                "what a stage sends to another process must have the same structure and shapes for "
                "all micro-batches of as many rows, since it is announced once "
                f"(stage: {j - 1}, micro-batch: {i}, announced: {announced}, sent: {sent}); pad "
                "tensors to one shape, pass what differs as a tensor, or put both layers into one "
                "stage"
            )
        return None

    def read(self, j: int, i: int, data: Tensor) -> Form:
        """Read, and remember, the form of what stage ``j`` is sent."""
        sent: Form = pickle.loads(data.numpy().tobytes())
        form = self._known[self._shapes, j, self._rows[i]] = sent.renamed(self._routes.parts)
        return form


def _pickled(form: Form, j: int) -> Tensor:
    """A form as a tensor of bytes."""
    try:
        data = pickle.dumps(form)
    except Exception as error:
        raise TypeError(
            "what passes between processes must be tensors, and other objects that pickle takes "
            f"(stage: {j}, {type(error).__name__}: {error}); have the layers pass tensors or plain "
            "numbers, or put both layers into one stage"
        ) from error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(CPU)
