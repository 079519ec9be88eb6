"""Lazy outputs: other outputs than the loss are joined, or computed, when they are first read.

Models of Hugging Face return their logits with the loss. The logits of all micro-batches take
more memory than anything else, and most callers use the loss alone. So the wrapper returns an
output of the model's own class that joins those of all micro-batches when one is read. From then on
it is an ordinary object.

Where all micro-batches are checkpointed, what :mod:`torchgpipe.mapped.tail` computes again in
backward can be computed for the caller, too, so that it is omitted. Until then, a stand-in replaces
such a tensor in the graph of autograd: one number, expanded to the shape of the tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.fork_join import alias
from torchgpipe.devices.streams import current_stream, record_stream, wait_stream
from torchgpipe.mapped.tail import Tail
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.microbatch import VALUE, Batch, join_tensors
from torchgpipe.values.structure import is_dense, leaves_of, map_leaves

__all__: list[str] = []


def can_fill_itself(output: Any) -> bool:
    """Whether an output is a mapping of its attributes, as those of Hugging Face are."""
    return isinstance(output, OrderedDict) and is_dataclass(output)


def omissible(output: Any, batch: Batch, tail: Tail) -> list[Tensor]:
    """The tensors of an output that can be omitted, and computed when they are read.

    Returns:
        The tensors that have rows, if there is also a loss.
    """
    if not can_fill_itself(output):
        return []
    tensors = [x for x in output.values() if isinstance(x, Tensor) and tail.number(x) is not None]
    return with_rows(tensors, batch.parts[VALUE]) if any(map(is_loss, tensors)) else []


def is_loss(value: Any) -> bool:
    """Whether a value of an output may be a loss to train by."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad


def with_rows(tensors: Iterable[Tensor], among: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that have rows, and occur once among others."""
    return [x for x in tensors if x.dim() and sum(x is y for y in among) == 1]


class StandIn(torch.autograd.Function):
    """Replace a tensor by one expanded number, but keep its place in the graph of autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.new_empty(()).expand(tensor.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return grad


class Filled(torch.autograd.Function):
    """Put a value in the place of a stand-in: ``stand_in, value → value``."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        output = alias(value)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class Omitted:
    """The omitted outputs of a step."""

    def __init__(self) -> None:
        #: For each micro-batch: the indices of its omitted tensors, and a checkpoint to make these.
        self._makers: dict[int, tuple[Sequence[int], Checkpoint]] = {}
        self._rows: list[list[Tensor]] = []
        self._places: list[int] = []

    def add(self, i: int, batch: Batch, tensors: Sequence[Tensor], maker: Checkpoint) -> None:
        """Note which tensors of a micro-batch are omitted."""
        numbers = {id(x): k for k, x in enumerate(batch)}
        self._makers[i] = [numbers[id(x)] for x in tensors], maker

    def without(self, i: int, batch: Batch) -> Batch:
        """The output of a micro-batch, with stand-ins."""
        if i not in self._makers:
            return batch
        places, _ = self._makers[i]
        return batch.replace([StandIn.apply(x) if k in places else x for k, x in enumerate(batch)])

    def take(self, batches: list[Batch], *, joins: bool) -> None:
        """Replace tensors by meta tensors, which take no memory when they are joined.

        Args:
            batches: the outputs of all micro-batches.
            joins: whether they will be joined. Otherwise no tensors but stand-ins are replaced.
        """
        places = {k for places, _ in self._makers.values() for k in places}
        if joins:
            places |= joined_later(batches)
        self._places = sorted(places)
        for i, batch in enumerate(batches if self._places else ()):
            self._rows.append([batch[k] for k in self._places])
            batches[i] = batch.replace(
                [
                    torch.empty_like(x, device="meta") if k in places else x
                    for k, x in enumerate(batch)
                ]
            )

    def put(self, output: Any, device: torch.device | None) -> Any:
        """Make the output of a step compute what was replaced when it is read.

        Args:
            output: the outputs of all micro-batches, joined, or a list of them.
            device: where outputs go to; None if they stay where they are.
        """
        if not self._places:
            return output
        if not isinstance(output, list):
            return self._filling(output, range(len(self._rows)), device)
        return [self._filling(x, range(i, i + 1), device) for i, x in enumerate(output)]

    def _filling(self, output: Any, numbers: range, device: torch.device | None) -> Any:
        there = {key: x for key, x in output.items() if not any(map(is_meta, leaves_of(x)))}
        values = {key: x for key, x in output.items() if key not in there}

        def make() -> dict[str, Any]:
            metas = filter(is_meta, leaves_of(values))
            made = dict(zip(map(id, metas), self._made(numbers, device)))
            return {
                key: map_leaves(lambda x: made.get(id(x), x), value)
                for key, value in values.items()
            }

        return on_reading(output, there, make)

    @uncompiled
    def _made(self, numbers: range, device: torch.device | None) -> list[Tensor]:
        columns: list[list[Tensor]] = [[] for _ in self._places]
        for i in numbers:
            made = self._computed(i)
            for column, k, x in zip(columns, self._places, self._rows[i]):
                x = Filled.apply(x, made[k]) if k in made else x
                column.append(x if device is None else x.to(device))
        return [join_tensors(tuple(column)) for column in columns]

    def _computed(self, i: int) -> dict[int, Tensor]:
        if i not in self._makers:
            return {}
        places, maker = self._makers[i]
        try:
            tensors = dict(zip(places, maker.compute()))
        except RuntimeError as error:
            raise RuntimeError(
                "what a model returns beside its loss is computed when somebody looks at it, under "
                f"checkpoint='always', and now it cannot be computed any more ({error}); look at "
                "it before the optimizer's step, or use checkpoint='except_last'"
            ) from error
        for x in tensors.values():
            stream = current_stream(x.device)
            # guard: waiting for what somebody looks at
            wait_stream(stream, maker.stream)
            record_stream(x, stream)
        return tensors


def joined_later(batches: Sequence[Batch]) -> set[int]:
    """The indices of the tensors that can be joined when somebody reads them."""
    first, *others = [batch.parts[VALUE] for batch in batches]
    output = batches[0].value
    if not (others and can_fill_itself(output) and any(map(is_loss, output.values()))):
        return set()
    if any(map(is_meta, first)):
        return set()
    joinable = [{*map(id, with_rows(filter(is_dense, part), part))} for part in (first, *others)]
    return {
        k
        for k, column in enumerate(zip(first, *others))
        # Tensors of subclasses are joined at once. Others wait until the caller reads them, with a
        # meta tensor in their place, which a subclass may not have.
        if all(type(x) is Tensor and id(x) in ids for x, ids in zip(column, joinable))
    }


def is_meta(value: Any) -> bool:
    """Whether a value is a tensor on the meta device."""
    return isinstance(value, Tensor) and value.is_meta


#: An output's attribute with the names of its missing values, and a function to compute them.
MISSING = "_torchgpipe_missing"


def there(output: Any) -> dict[str, Any]:
    """The values of an output that can be read without computing any."""
    missing, _ = object.__getattribute__(output, "__dict__").get(MISSING, ((), None))
    return {key: output[key] for key in output if key not in missing}


def on_reading(like: Any, values: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]) -> Any:
    """Make an output that computes its values when one is read, but for some."""
    kind: Any = type(like)
    state = {**object.__getattribute__(like, "__dict__")}
    if state.pop(MISSING, None):
        (kind,) = kind.__bases__
    output = OrderedDict.__new__(kind)
    for name in like:
        OrderedDict.__setitem__(output, name, values.get(name))
    vars(output).update(state, **values)
    if names := [name for name in like if name not in values]:
        vars(output)[MISSING] = names, make
        object.__setattr__(output, "__class__", on_demand(kind))
    return output


#: Attributes that can be used without making an output compute its missing values.
HARMLESS = {"__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__"}
HARMLESS |= {"__class_getitem__", "__del__", "__getattribute__", "__setattr__", "__post_init__"}
HARMLESS |= {"__contains__", "__len__", "__iter__", "__reversed__", "keys"}


@cache
def on_demand(kind: type) -> type:
    """Derive a class of outputs that fill themselves when read, and then become ``kind`` again."""

    def fill(output: Any) -> None:
        attributes = object.__getattribute__(output, "__dict__")
        names, make = attributes[MISSING]
        # With gradients, even if grad mode is off: a later reader of the output may need them.
        with torch.inference_mode(False), torch.enable_grad():
            made = make()
        del attributes[MISSING]
        object.__setattr__(output, "__class__", kind)
        for name in names:
            output[name] = made[name]

    def is_there(output: Any, name: Any) -> bool:
        names, _ = object.__getattribute__(output, "__dict__")[MISSING]
        return name not in names and OrderedDict.__contains__(output, name)

    def filling(name: str) -> Callable[..., Any]:
        def method(output: Any, *args: Any, **kwargs: Any) -> Any:
            fill(output)
            return getattr(kind, name)(output, *args, **kwargs)

        return method

    def get(output: Any, name: str) -> Any:
        if not (name in HARMLESS or is_there(output, name)):
            fill(output)
        return object.__getattribute__(output, name)

    def item(output: Any, key: Any) -> Any:
        first = next(iter(output)) if key == 0 else key
        if not (isinstance(first, str) and is_there(output, first)):
            fill(output)
            return output[key]
        return OrderedDict.__getitem__(output, first)

    special = [
        x
        for x in dir(kind)
        if x.startswith("__") and x not in HARMLESS and callable(getattr(kind, x))
    ]
    table: dict[str, Any] = {name: filling(name) for name in special}
    table |= {"__getattribute__": get, "__getitem__": item, "__module__": kind.__module__}
    # Code such as ``type(output)(...)`` must make a plain ``kind``, with all its values.
    table["__new__"] = lambda _, *args, **kwargs: kind(*args, **kwargs)
    # Made with another name: Transformers registers new classes by name, and must keep ``kind``.
    subclass = type(f"{kind.__name__}OnDemand", (kind,), table)
    subclass.__name__, subclass.__qualname__ = kind.__name__, kind.__qualname__
    return subclass
