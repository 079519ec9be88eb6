"""Mini-batches that cannot be cut by rows: a Trainer's data collator makes their micro-batches."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.ambient.notes import warn
from torchgpipe.autograd.versions import version_of
from torchgpipe.mapped.hugging_face import IGNORED
from torchgpipe.values.division import FlatInput, divided

__all__: list[str] = []


# A mini-batch whose tensors all have its rows is cut into micro-batches like any other input. A row
# of several packed sequences cannot be cut, nor can a tensor with a row for each patch of each
# image. Where there are such, the data collator makes each micro-batch of some examples, and joins
# them to the mini-batch. This mini-batch carries its micro-batches under KEY through the workers of
# the data loader and through Accelerate, until the Trainer collects the mini-batches of a step.


#: The key under which a mini-batch carries its micro-batches.
KEY = "torchgpipe.micro_batches"

#: Words in the names of arguments for images, videos and audio. Beside text such arguments are not
#: cut by rows: one text may have two images and another none, even with equally many rows.
BESIDE_TEXT = ("pixel", "image", "video", "audio", "input_features")


class Collator:
    """A data collator that makes micro-batches of what cannot be cut.

    Args:
        collate: the Trainer's own collator.
        chunks: the number of micro-batches to make.
        is_sliced: whether Accelerate will slice the mini-batch by rows.
    """

    def __init__(self, collate: Callable[[Any], Any], chunks: int, is_sliced: bool) -> None:
        self.collate, self._chunks, self._is_sliced = collate, chunks, is_sliced
        #: Whether the mini-batches so far could be cut by rows; None before the first mini-batch.
        self._is_cut: bool | None = None
        #: Whether a mini-batch is a single row: then micro-batches are joined in dimension 1.
        self._is_one_row = False

    def __getattr__(self, name: str) -> Any:
        # A copy begins without ``collate``. To read ``self.collate`` then would recurse for ever.
        if name == "collate" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Collate a mini-batch, or its micro-batches if it cannot be cut."""
        examples = [*examples]
        if self._is_cut is False:
            return self._in_parts(examples)
        passed, numbers = examples, random_state()
        if self._is_cut is None:
            # The first mini-batch may be collated twice, and a collator may change its examples.
            with suppress(Exception):
                passed = copy.deepcopy(examples)
        output = self.collate(passed)
        if not isinstance(output, Mapping):
            return output
        batch = {**output}
        flat = FlatInput(batch)
        if flat.given:
            # The user's collator has returned Chunks, which are micro-batches already.
            return as_one_batch([*flat.split(flat.division(1))], False)
        if has_rows(batch, len(examples)):
            self._is_cut = True
            return output
        if self._is_sliced:
            raise ValueError(
                "a mini-batch of a streamed dataset must have a row for each example in all "
                "tensors, since Accelerate slices them (examples: "
                f"{len(examples)}, shapes: {shapes_in(batch)}); pass "
                "accelerator_config={'dispatch_batches': False} to TrainingArguments"
            )
        if self._is_cut is None:
            restore_random_state(numbers)
        self._is_cut = False
        tensors = [x for x in batch.values() if isinstance(x, Tensor) and x.dim()]
        self._is_one_row = all(len(x) == 1 for x in tensors)
        return self._in_parts(examples, batch)

    def _in_parts(self, examples: list[Any], whole: dict[str, Any] | None = None) -> dict[str, Any]:
        """Collate some examples for each micro-batch."""
        sizes = divided(len(examples), max(1, min(len(examples), self._chunks)))
        starts = accumulate(sizes, initial=0)
        try:
            parts = [{**self.collate(examples[k : k + n])} for k, n in zip(starts, sizes)]
        except Exception as error:
            if len(sizes) == 1:
                raise
            return self._in_one(examples, whole, f"raised {type(error).__name__}: {error}")
        batch = as_one_batch(parts, self._is_one_row)
        if whole and has_other_order(batch, whole):
            # TRL collates pairs so: all chosen answers, then all rejected ones. Joined parts would
            # have another order. So the mini-batch stays whole, and the model's arguments are cut.
            self._is_cut = True
            return whole
        if whole and self._is_one_row and shapes_in(batch) != shapes_in(whole):
            # Joined parts must be as long as the row. Cumulated lengths are no row, and may grow.
            keys = [key for key, x in shapes_in(whole).items() if x[:1] == (1,)]
            if any(shapes_in(batch)[key] != shapes_in(whole)[key] for key in keys):
                return self._in_one(examples, whole, "makes other rows of them")
        return batch

    def _in_one(
        self, examples: list[Any], whole: dict[str, Any] | None, why: str
    ) -> dict[str, Any]:
        """Collate all examples as one micro-batch, from now on, and say so."""
        warn(
            "a data collator whose mini-batches cannot be cut by rows is called with the examples "
            f"of each micro-batch, and {why} (collator: {type(self.collate).__name__}); each "
            "mini-batch is one micro-batch, so have the collator take any number of examples"
        )
        self._chunks = 1
        return as_one_batch([whole or {**self.collate(examples)}], self._is_one_row)


def has_rows(batch: dict[str, Any], count: int) -> bool:
    """Whether a mini-batch of some examples can be cut by rows."""
    if "input_ids" in batch and any(word in key for key in batch for word in BESIDE_TEXT):
        return False
    flat = FlatInput(batch)
    try:
        flat.division(max(2, count))
    except (TypeError, ValueError):
        return False
    return count == 1 or flat.rows > 1


def has_other_order(batch: Mapping[str, Any], whole: Mapping[str, Any]) -> bool:
    """Whether a tensor of a mini-batch has the rows that it has in another one, in other order."""

    def rows(x: Tensor) -> list[Any]:
        return [row.flatten().tolist() for row in x]

    return any(
        rows(x) != rows(batch[key]) and sorted(rows(x)) == sorted(rows(batch[key]))
        for key, x in whole.items()
        if isinstance(x, Tensor) and x.dim() and x.shape == getattr(batch.get(key), "shape", None)
    )


def shapes_in(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a mini-batch."""
    return {key: tuple(x.shape) for key, x in batch.items() if isinstance(x, Tensor)}


def random_state() -> tuple[Any, Any, Any]:
    """The states of the generators that a collator may draw from."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def restore_random_state(state: tuple[Any, Any, Any]) -> None:
    """Put the states of these generators back."""
    ours, pythons, numpys = state
    torch.set_rng_state(ours)
    random.setstate(pythons)
    if numpys is not None:
        sys.modules["numpy"].random.set_state(numpys)


def as_one_batch(parts: list[dict[str, Any]], is_one_row: bool) -> dict[str, Any]:
    """Make a mini-batch of micro-batches, with these in it."""
    batch: dict[str, Any] = {}
    for key in dict.fromkeys(chain(*parts)):
        values = [part[key] for part in parts if key in part]
        tensors = all(isinstance(x, Tensor) for x in values) and len({x.dim() for x in values}) == 1
        fill = IGNORED if "label" in key else 0
        batch[key] = in_one(values, is_one_row, fill) if tensors and len(parts) > 1 else values[0]
    return {**batch, KEY: parts}


def in_one(tensors: Sequence[Tensor], is_one_row: bool, fill: int = 0) -> Tensor:
    """Join what micro-batches have, of several lengths.

    Args:
        tensors: a tensor of each micro-batch.
        is_one_row: whether the mini-batch is one row, of which each micro-batch is a part.
        fill: what stands at the ends of shorter rows.
    """
    if tensors[0].dim() == 0:
        return torch.stack([*tensors])
    if is_one_row and tensors[0].dim() > 1 and all(len(x) == 1 for x in tensors):
        return torch.cat([*tensors], dim=1)
    sizes = [max(size) for size in zip(*[x.shape[1:] for x in tensors])]
    padded = []
    for x in tensors:
        missing = [(0, most - size) for most, size in zip(sizes, x.shape[1:])]
        padded.append(F.pad(x, [*chain(*reversed(missing))], value=fill))
    return torch.cat(padded)


class Collated:
    """A mini-batch that cannot be cut, as the collator has made it, and its micro-batches."""

    def __init__(self, batch: Any) -> None:
        self.parts: list[dict[str, Any]] = batch.pop(KEY)
        self.batch = batch
        self._tensors = [(k, x, version_of(x)) for k, x in batch.items() if isinstance(x, Tensor)]

    def is_unchanged(self) -> bool:
        """Whether nobody has changed or replaced its tensors since."""
        return all(self.batch.get(k) is x and version_of(x) == n for k, x, n in self._tensors)


class Prepared(NamedTuple):
    """A mini-batch on its device, and its micro-batches."""

    batch: dict[str, Any]
    parts: list[dict[str, Any]]

    def count_in(self, kwargs: Mapping[str, Any]) -> int:
        """Count the keyword arguments of the model that are tensors of this mini-batch."""
        tensors = [(key, x) for key, x in self.batch.items() if isinstance(x, Tensor)]
        return sum(kwargs.get(key) is x for key, x in tensors)

    def divided(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Divide the arguments of the model as the collator has divided the mini-batch.

        Raises:
            ValueError: a tensor among them is none of the mini-batch's, or has no name.
        """
        known = {key for key, x in kwargs.items() if key in self.batch and x is self.batch[key]}
        others = {key: x for key, x in kwargs.items() if key not in known}
        names = [*others, *(f"argument {k}" for k in range(len(args)))]
        pairs = zip(names, [*others.values(), *args])
        strange = [name for name, x in pairs if isinstance(x, Tensor) and x.dim()]
        if strange and len(self.parts) > 1:
            raise ValueError(
                "what a model is called with must come by name from the data collator where a "
                f"mini-batch cannot be cut by rows (arguments: {strange}, shapes: "
                f"{shapes_in(kwargs)}); have the collator make these, or set pipe.chunks = 1"
            )
        return [{**others, **{k: part[k] for k in known if k in part}} for part in self.parts]


class Loader:
    """A data loader whose mini-batches are without their micro-batches.

    Args:
        loader: the loader.
        take: takes the micro-batches out of a mini-batch, and returns it.
    """

    def __init__(self, loader: Any, take: Callable[[Any], Any]) -> None:
        self._loader, self._take = loader, take

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._take, self._loader)
