"""Mini-batches that cannot be cut by rows: a Trainer's data collator makes their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.transformers.counting import IGNORED
from torchgpipe.values.division import divided, division_of, has_chunks, row_count, split

__all__: list[str] = []


# A mini-batch whose tensors all have its rows is cut into micro-batches like any other input. One
# row of several packed sequences has none to cut, and neither has a tensor with a row for each
# patch of each image. The collator knows how to make such a mini-batch of examples, so it makes the
# micro-batches, too, each of some of the examples. They travel within the mini-batch, through
# workers and Accelerate, and are taken out before anybody reads it.


#: The key of the micro-batches within a mini-batch.
KEY = "torchgpipe.micro_batches"


class Collator:
    """A data collator that adds micro-batches to mini-batches that cannot be cut.

    Args:
        collate: the Trainer's own collator.
        chunks: the number of micro-batches to make.
        is_sliced: whether Accelerate will slice the mini-batch by rows.
    """

    def __init__(self, collate: Callable[[Any], Any], chunks: int, is_sliced: bool) -> None:
        self.collate, self._chunks, self._is_sliced = collate, chunks, is_sliced

    def __call__(self, examples: Sequence[Any]) -> Any:
        """Collate a mini-batch, and its micro-batches if it cannot be cut."""
        found = self.collate(examples)
        if isinstance(found, Mapping) and has_chunks({**found}):
            # The collator has made them itself.
            parts = [*split({**found}, division_of({**found}, 1))]
            return {**joined(parts), KEY: parts}
        if not isinstance(found, Mapping) or has_rows({**found}, len(examples)):
            return found
        if self._is_sliced:
            raise ValueError(
                "a mini-batch of a streamed dataset must have a row for each example in all "
                "tensors, since Accelerate slices them (examples: "
                f"{len(examples)}, shapes: {shapes_in(found)}); pass "
                "accelerator_config={'dispatch_batches': False} to TrainingArguments"
            )
        own: Any = found
        own[KEY] = self._parts({**found}, [*examples])
        return found

    def _parts(self, batch: dict[str, Any], examples: list[Any]) -> list[dict[str, Any]]:
        """Collate some examples for each micro-batch; one of all if these are not the same rows."""
        sizes = divided(len(examples), min(len(examples), self._chunks))
        if len(sizes) == 1:
            return [batch]
        starts = accumulate(sizes, initial=0)
        try:
            parts = [{**self.collate(examples[k : k + n])} for k, n in zip(starts, sizes)]
        except Exception:
            # It may need more examples, as for pairs.
            return [batch]
        rows = {key: x for key, x in batch.items() if isinstance(x, Tensor) and x.dim()}
        if any(len(x) != 1 for x in rows.values()):
            return parts
        # One row of them all has their places, one after another.
        places = {key: sum(part[key].numel() for part in parts) for key in rows}
        return parts if all(x.numel() == places[key] for key, x in rows.items()) else [batch]


def has_rows(batch: dict[str, Any], count: int) -> bool:
    """Whether a mini-batch of some examples can be cut by rows.

    Texts with images cannot: there may be as many images as texts, and two of them in one.
    """
    if "input_ids" in batch and any("pixel" in key for key in batch):
        return False
    try:
        division_of(batch, max(2, count))
    except (TypeError, ValueError):
        return False
    return count == 1 or row_count(batch) > 1


def shapes_in(batch: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a mini-batch, for messages."""
    return {key: tuple(x.shape) for key, x in batch.items() if isinstance(x, Tensor)}


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


class Prepared(NamedTuple):
    """A mini-batch on its device, and its micro-batches.

    Args:
        batch: what the collator made of all examples.
        parts: what it made of some examples each.
    """

    batch: dict[str, Any]
    parts: list[dict[str, Any]]

    def is_in(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether some arguments of the model are this mini-batch."""
        return any(kwargs.get(key) is x for key, x in self.batch.items() if isinstance(x, Tensor))

    def divided(self, kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Divide the arguments of the model as the collator has divided the mini-batch.

        Raises:
            ValueError: a tensor among them is none of the mini-batch's.
        """
        own = {key for key, x in kwargs.items() if key in self.batch and x is self.batch[key]}
        others = {key: x for key, x in kwargs.items() if key not in own}
        strange = [key for key, x in others.items() if isinstance(x, Tensor) and x.dim()]
        if strange and len(self.parts) > 1:
            raise ValueError(
                "what a model is called with must come from the data collator where a mini-batch "
                f"cannot be cut by rows (arguments: {strange}, shapes: {shapes_in(kwargs)}); have "
                "the collator make these, or set pipe.chunks = 1"
            )
        return [{**others, **{key: part.get(key) for key in own}} for part in self.parts]


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
        padded.append(F.pad(x, [*chain(*reversed(missing))], value=fill) if any(sizes) else x)
    return torch.cat(padded)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join micro-batches to what a mini-batch may look like, for code that reads it."""
    found = {}
    for key, first in parts[0].items():
        values = [part[key] for part in parts]
        tensors = isinstance(first, Tensor) and len({x.dim() for x in values}) == 1
        fill = IGNORED if "label" in key else 0
        found[key] = in_one(values, False, fill) if tensors else first
    return found
