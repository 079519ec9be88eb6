"""Micro-batches: a mini-batch is scattered into them, and their outputs are gathered again.

Nested structures end here: the engine sees the flat tensors of a :class:`Batch`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations, product, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe.devices.streams import device_types
from torchgpipe.values.division import Division, FlatInput, is_list_of_rows, rows_in
from torchgpipe.values.marks import is_marked, tensors_in, unmarked
from torchgpipe.values.order import verify_rows
from torchgpipe.values.structure import (
    Arguments,
    Spec,
    Structure,
    Tensors,
    equal,
    flatten,
    leaves_of,
    map_leaves,
    names,
)

__all__: list[str] = []

#: The key, in ``Batch.parts``, of the tensors of a micro-batch's value; other keys are of skips.
VALUE = None


class PackedSkip(NamedTuple):
    """A skip between stash and pop, as its tensors and its structure."""

    tensors: Tensors
    structure: Structure


class Batch:
    """One micro-batch at the entrance of a partition, or at its exit.

    It consists of parts: its value and its skips, each flattened into tensors and a structure. A
    skip is flattened after the layers that stash it have run, and unflattened when it is popped.

    Args:
        value: the input or output of a layer: any nested structure; or its leaves.
        spec: the containers of the value, where its leaves are given.

    Raises:
        TypeError: the value holds tensors in something that is no known container.
    """

    __slots__ = ("_single", "parts", "shared", "structures")

    def __init__(self, value: Any, spec: Spec | None = None) -> None:
        tensors, structure = flatten(value, spec)
        #: The tensors of the value, by key ``VALUE``, and those of each skip, by the skip's key.
        self.parts: dict[Any, Tensors] = {VALUE: tensors}
        #: For each key of ``parts``, the containers that its tensors were in, and the objects in
        #: these containers that are no tensors.
        self.structures = {VALUE: structure}
        # Whether one tensor is all, as in most micro-batches: methods take a shorter way then.
        self._single = len(tensors) == 1
        #: The keys of ``parts`` under which a tensor shares memory with another tensor. Layers must
        #: not change tensors under these keys in place.
        self.shared: frozenset[Any] = frozenset() if self._single else self._aliased()

    @classmethod
    def of(
        cls,
        parts: Mapping[Any, Tensors],
        structures: Mapping[Any, Structure],
        shared: frozenset[Any],
    ) -> Batch:
        """Make a micro-batch of parts that are flattened already, as its attributes have them."""
        batch: Batch = object.__new__(cls)
        batch.parts, batch.structures, batch.shared = dict(parts), dict(structures), shared
        batch._single = len(parts) == len(batch.parts[VALUE]) == 1
        return batch

    @property
    def value(self) -> Any:
        """The micro-batch as layers see it."""
        return self.structures[VALUE].unflatten(self.parts[VALUE])

    @property
    def others(self) -> dict[int, Any]:
        """The leaves of the value that are no tensors, by their index."""
        return self.structures[VALUE].others

    @property
    def shapes(self) -> list[torch.Size]:
        """The shapes of the tensors of the value."""
        return [x.shape for x in self.parts[VALUE]]

    @property
    def skips(self) -> dict[Any, PackedSkip]:
        """All parts but the value."""
        return {
            key: PackedSkip(tensors, self.structures[key])
            for key, tensors in self.parts.items()
            if key is not VALUE
        }

    @property
    def tensors(self) -> Tensors:
        """All tensors, each once: the tensors of the value, then those of the skips."""
        return self.parts[VALUE] if self._single else _distinct(self.parts.values())

    @property
    def requires_grad(self) -> bool:
        """Whether any of the tensors requires a gradient."""
        if self._single:
            return self.parts[VALUE][0].requires_grad
        return any(tensor.requires_grad for tensor in self.tensors)

    def call(self, function: Callable[..., Any]) -> Batch:
        """Call a layer with the value; return the output as a micro-batch."""
        value = self.value
        if not isinstance(value, Arguments):
            return Batch(function(value))
        return Batch(function(*value.args, **value.kwargs))

    def with_skips(self, skips: Mapping[Any, PackedSkip], shared: Iterable[Any] = ()) -> Batch:
        """Make a micro-batch of the same value and other skips.

        Args:
            skips: the skips, taken apart.
            shared: the skips that share memory with a tensor that is no longer in this micro-batch.
        """
        if not skips and len(self.parts) == 1:
            return self
        batch = self._of({VALUE: self.parts[VALUE]})
        batch.structures = {VALUE: self.structures[VALUE]}
        for key, skip in skips.items():
            batch.parts[key], batch.structures[key] = skip
        batch._single = len(batch.parts) == len(batch.parts[VALUE]) == 1
        batch.shared = self.shared & {VALUE} | skips.keys() & set(shared)
        if not batch._single:
            batch.shared |= batch._aliased()
        return batch

    def take(self) -> Batch:
        """Move the tensors into a new micro-batch; this object releases them."""
        parts, self.parts = self.parts, {}
        return self._of(parts)

    def replace(self, tensors: Iterable[Tensor]) -> Batch:
        """Make a micro-batch with other tensors in place of its :attr:`tensors`."""
        if self._single:
            return self._of({VALUE: tuple(tensors)})
        return self.map(lambda *_: tensors, self.parts)

    def map(self, function: Callable[..., Iterable[Tensor]], parts: Iterable[Any]) -> Batch:
        """Apply a function to the tensors of some parts; return a micro-batch with the results.

        A tensor that occurs several times is passed once, and stays one object.
        """
        if self._single:
            for _ in parts:
                return self._of({VALUE: tuple(function(*self.parts[VALUE]))})
            return self
        chosen = {key: self.parts[key] for key in parts}
        distinct = _distinct(chosen.values())
        if not distinct:
            return self
        replaced = dict(zip(map(id, distinct), function(*distinct)))
        return self._of(
            self.parts
            | {key: tuple([replaced[id(tensor)] for tensor in old]) for key, old in chosen.items()}
        )

    def copy(self) -> Batch:
        """Copy the object, and not its tensors, so that the copy can release them on its own."""
        return self._of(self.parts)

    def _of(self, parts: dict[Any, Tensors]) -> Batch:
        batch = object.__new__(Batch)
        batch.parts, batch.structures = parts, self.structures
        batch.shared, batch._single = self.shared, self._single
        return batch

    def aliases(self, other: Batch) -> bool:
        """Whether a tensor of this value shares memory with one of the other micro-batch."""
        return any(starmap(_torch.is_alias_of, product(self.parts[VALUE], other.tensors)))

    def _aliased(self) -> frozenset[Any]:
        # A tensor that is in two parts is listed for both, so that both count as sharing memory.
        sharing: defaultdict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
        for key, part in self.parts.items():
            for x in _distinct([part]):
                sharing[_address(x)].append((key, x))
        return frozenset(
            key
            for tensors in sharing.values()
            for (one, a), (other, b) in combinations(tensors, 2)
            if _torch.is_alias_of(a, b)
            for key in (one, other)
        )

    def __repr__(self) -> str:
        return f"Batch({self.value!r})"

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts[VALUE] if self._single else self.tensors)

    def __getitem__(self, index: int) -> Tensor:
        return self.tensors[index]


def _distinct(parts: Iterable[Tensors]) -> Tensors:
    return tuple({id(tensor): tensor for tensor in chain.from_iterable(parts)}.values())


def _address(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        # Sparse tensors have no storage. All get the address 0, so every two are compared.
        return 0


def scatter(input: Any, chunks: int) -> list[Batch]:
    """Divide a mini-batch into micro-batches: see :mod:`torchgpipe.values.division`."""
    flat = FlatInput(input)
    return [Batch(leaves, flat.spec) for leaves in flat.parts(flat.division(chunks))]


def gather(outputs: Sequence[Batch], rows: Sequence[int] = (), blocks: Container[int] = ()) -> Any:
    """Join the outputs of all micro-batches along dimension 0: the inverse of :func:`scatter`.

    Tensors without a dimension are stacked, ``()`` to ``(m,)``, and so is what is marked by
    :class:`PerMicroBatch`. Other objects have to be equal in all micro-batches.

    Args:
        outputs: the outputs, in order.
        rows: the number of rows of each micro-batch. Without it, dimension 0 may have any size.
        blocks: the indices of output tensors that have several rows per input row, block by block.

    Raises:
        ValueError: the outputs differ in structure or in objects that are no tensors, or tensors
            differ in another dimension than 0, or their sizes in dimension 0 are not the same
            multiple of the rows, or their rows are block by block.
    """
    first = outputs[0]
    for i, other in enumerate(outputs):
        _compare(first, other, i)
    marked = _marked(first)
    joined: dict[tuple[int, ...], Tensor] = {}
    joined_tensors = []
    for k, tensors in enumerate(zip(*[batch.parts[VALUE] for batch in outputs])):
        # A tensor that occurs twice in each output is joined once, and stays one object.
        stacked = marked is not None and k in marked
        key = (stacked, *map(id, tensors))
        if key not in joined:
            if stacked:
                joined[key] = _stacked(tensors, rows)
            else:
                if rows:
                    verify_rows(partial(_name, first, k), tensors, rows, k in blocks)
                joined[key] = join_tensors(tensors)
        joined_tensors.append(joined[key])
    value = first.structures[VALUE].unflatten(tuple(joined_tensors))
    return value if marked is None else unmarked(value)


def joined(outputs: Sequence[Batch], division: Division, blocks: Container[int] = ()) -> Any:
    """Do as :func:`gather` does, or return a list of the outputs if the caller divided all.

    Raises:
        ValueError: as :func:`gather` does; or lists came in alone, and such a list comes out.
    """
    if division.is_ready:
        return [unmarked(x.value) for x in outputs]
    sizes = division.rows if division.is_listed else []
    columns = [leaves_of(x.value, is_list_of_rows) for x in outputs[: len(sizes)]]
    for k, leaves in enumerate(zip(*columns)):
        pairs = [*zip(leaves, sizes)]
        by_row = all(is_list_of_rows(leaf) and len(leaf) == n for leaf, n in pairs)
        # The lists of two micro-batches are joined entry by entry. That is right for a list of
        # feature maps, each of which has all rows, and wrong for a list with an entry for each row.
        if by_row and any(rows_in(x) != n for leaf, n in pairs for x in leaf):
            name, _ = [*names(outputs[0].value, is_list_of_rows)][k]
            raise ValueError(
                "a list with an entry for each row is not joined, but the tensors in it (output: "
                f"{name}, entries: {sizes[0]}, rows: {sizes}); pass the lists of the input as "
                "torchgpipe.Chunks, for a list of outputs, or have the model return a tuple"
            )
    return gather(outputs, division.rows, blocks)


def _marked(batch: Batch) -> set[int] | None:
    """The indices of the tensors that are marked by :class:`PerMicroBatch`; None without marks."""
    is_plain = batch.structures[VALUE].spec is None
    leaves = [] if is_plain else leaves_of(batch.value, is_marked)
    if not any(map(is_marked, leaves)):
        return None
    within = [is_marked(x) for x in leaves for _ in tensors_in(x)]
    return {k for k, marked in enumerate(within) if marked}


def _name(first: Batch, k: int) -> str:
    """The path to tensor ``k`` in an output, for messages."""
    return [name for name, leaf in names(first.value) if isinstance(leaf, Tensor)][k]


def _stacked(tensors: Tensors, rows: Sequence[int]) -> Tensor:
    if len({x.shape for x in tensors}) > 1:
        raise ValueError(
            "what is marked by PerMicroBatch must have the same shape in all micro-batches, which "
            f"are stacked (shapes: {[tuple(x.shape) for x in tensors]}); have the last layer pad "
            f"it to one shape{', or pass rows that are a multiple of chunks' * (len({*rows}) > 1)}"
        )
    return join_tensors(tuple([x.unsqueeze(0) for x in tensors]))


def join_tensors(tensors: Tensors) -> Tensor:
    """Concatenate the tensors of all micro-batches along dimension 0; stack 0-dimensional ones."""
    if len({(x.dim(), x.shape[1:]) for x in tensors}) > 1:
        # Outputs of shape (rows, rows) compare the rows of a micro-batch: padding is no remedy.
        are_pairs = all(x.dim() == 2 and x.shape[0] == x.shape[1] for x in tensors)
        compared = "return what is compared, and compare it after the wrapper, where all rows are"
        raise ValueError(
            "the outputs of all micro-batches must have the same shape but for dimension 0, along "
            f"which they are joined (shapes: {[tuple(x.shape) for x in tensors]}); "
            f"{compared if are_pairs else 'have the last layer pad them to one length'}, or pass "
            "micro-batches of your own as torchgpipe.Chunks, for a list of their outputs"
        )
    kind = tensors[0].device.type
    if kind in device_types() and torch.is_autocast_enabled(kind):
        # Autocast is off, since it cannot concatenate tensors of a half precision it does not use.
        with torch.autocast(kind, enabled=False):
            return _cat_or_stack(tensors)
    return _cat_or_stack(tensors)


def _cat_or_stack(tensors: Tensors) -> Tensor:
    if tensors[0].dim() == 0:
        return torch.stack(tensors)
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _compare(first: Batch, other: Batch, i: int) -> None:
    a, b = first.structures[VALUE], other.structures[VALUE]
    if a is b:
        if len(first.parts[VALUE]) == len(other.parts[VALUE]):
            return
    elif a.spec is not None and a.spec == b.spec and a.others.keys() == b.others.keys():
        for k, leaf in a.others.items():
            if not equal(leaf, b.others[k]):
                name = list(names(first.value))[k][0]
                raise ValueError(
                    "outputs that are no tensors must be equal for all micro-batches, since "
                    f"they cannot be joined (output: {name}, micro-batch 0: {leaf!r}, "
                    f"micro-batch {i}: {b.others[k]!r}); have the last layer return a tensor"
                )
        return
    raise ValueError(
        "the outputs of all micro-batches must have the same structure "
        f"(micro-batch 0: {_outline(first)}, micro-batch {i}: {_outline(other)}); have the last "
        "layer return the same structure whatever the batch size"
    )


def _outline(batch: Batch) -> Any:
    return map_leaves(lambda leaf: type(leaf).__name__, batch.value)
