"""Outputs on demand: other outputs than the loss are computed when they are first read.

Models of Hugging Face return their logits with the loss. The logits of all micro-batches take
more memory than anything else, and most callers use the loss alone. Where all micro-batches are
checkpointed, what :mod:`torchgpipe.mapped.tail` computes again in backward can be computed for the
caller, too. So the wrapper returns an output of the model's own class that computes omitted tensors
when one is read. From then on it is an ordinary object.

Until then, a stand-in replaces such a tensor in the graph of autograd: one number, expanded to the
shape of the tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.fork_join import alias
from torchgpipe.devices.streams import current_stream, record_stream, wait_stream
from torchgpipe.mapped.tail import Tail
from torchgpipe.recompute.checkpoint import Checkpoint
from torchgpipe.values.microbatch import VALUE, Batch, join_tensors

__all__: list[str] = []


def can_fill_itself(output: Any) -> bool:
    """Whether an output is a mapping of its attributes, as those of Hugging Face are."""
    return isinstance(output, OrderedDict) and is_dataclass(output)


def omissible(output: Any, batch: Batch, tail: Tail) -> list[Tensor]:
    """The tensors of an output that can be omitted, and computed when they are read.

    Args:
        output: what a model has returned for a micro-batch.
        batch: the same, taken apart.
        tail: the code that has computed it.

    Returns:
        The tensors that have rows, if there is also a loss.
    """
    if not can_fill_itself(output):
        return []
    parts = batch.parts[VALUE]
    own = [x for x in output.values() if isinstance(x, Tensor) and tail.number(x) is not None]
    if not any(x.dim() == 0 and x.requires_grad for x in own):
        return []
    return [x for x in own if x.dim() and sum(x is y for y in parts) == 1]


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
        found = alias(value)
        if not ctx.needs_input_grad[0]:
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class Omitted:
    """The omitted outputs of a step."""

    def __init__(self) -> None:
        #: By micro-batch: the indices of its omitted tensors, and a checkpoint to compute them.
        self._found: dict[int, tuple[Sequence[int], Checkpoint]] = {}
        self._rows: list[list[Tensor]] = []
        self._places: list[int] = []

    def add(self, i: int, batch: Batch, tensors: Sequence[Tensor], maker: Checkpoint) -> None:
        """Note which tensors of a micro-batch are omitted."""
        numbers = {id(x): k for k, x in enumerate(batch)}
        self._found[i] = [numbers[id(x)] for x in tensors], maker

    def without(self, i: int, batch: Batch) -> Batch:
        """The output of a micro-batch, with stand-ins."""
        if i not in self._found:
            return batch
        places, _ = self._found[i]
        return batch.replace([StandIn.apply(x) if k in places else x for k, x in enumerate(batch)])

    def take(self, batches: list[Batch]) -> None:
        """Replace stand-ins by meta tensors, which take no memory when they are joined."""
        self._places = sorted({k for places, _ in self._found.values() for k in places})
        for i, batch in enumerate(batches if self._places else ()):
            self._rows.append([batch[k] for k in self._places])
            batches[i] = batch.replace(
                [
                    torch.empty_like(x, device="meta") if k in self._places else x
                    for k, x in enumerate(batch)
                ]
            )

    def put(self, output: Any, device: torch.device | None) -> Any:
        """Make the output of a step compute its omitted tensors when they are read.

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
        names = [k for k, x in output.items() if isinstance(x, Tensor) and x.is_meta]
        vars(output)[MISSING] = names, partial(self._made, numbers, device)
        own: type = type(output)
        object.__setattr__(output, "__class__", on_demand(own))
        return output

    @uncompiled
    def _made(self, numbers: range, device: torch.device | None) -> list[Tensor]:
        """Compute the omitted tensors of some micro-batches, and join them."""
        columns: list[list[Tensor]] = [[] for _ in self._places]
        with torch.inference_mode(False), torch.enable_grad():
            for i in numbers:
                made = self._computed(i)
                for column, k, x in zip(columns, self._places, self._rows[i]):
                    x = Filled.apply(x, made[k]) if k in made else x
                    column.append(x if device is None else x.to(device))
            return [join_tensors(tuple(column)) for column in columns]

    def _computed(self, i: int) -> dict[int, Tensor]:
        if i not in self._found:
            return {}
        places, maker = self._found[i]
        try:
            found = dict(zip(places, maker.compute()))
        except RuntimeError as error:
            raise RuntimeError(
                "what a model returns beside its loss is computed when somebody looks at it, under "
                f"checkpoint='always', and now it cannot be computed any more ({error}); look at "
                "it before the optimizer's step, or use checkpoint='except_last'"
            ) from error
        for x in found.values():
            stream = current_stream(x.device)
            # guard: waiting for what somebody looks at
            wait_stream(stream, maker.stream)
            record_stream(x, stream)
        return found


#: The attribute of an output with the names of omitted tensors, and a function to compute them.
MISSING = "_torchgpipe_missing"

#: Attributes that can be read without the omitted tensors.
HARMLESS = {"__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__"}
HARMLESS |= {"__class_getitem__", "__del__", "__getattribute__", "__setattr__", "__post_init__"}
HARMLESS |= {"__contains__", "__len__", "__iter__", "__reversed__", "keys"}


@cache
def on_demand(own: type) -> type:
    """Derive a class of outputs that fill themselves when read, and then become ``own`` again.

    Args:
        own: a class of outputs, which are mappings of their attributes.
    """

    def fill(output: Any) -> None:
        found = object.__getattribute__(output, "__dict__")
        names, make = found[MISSING]
        made = make()
        del found[MISSING]
        object.__setattr__(output, "__class__", own)
        for name, x in zip(names, made):
            output[name] = x

    def is_there(output: Any, name: Any) -> bool:
        names, _ = object.__getattribute__(output, "__dict__")[MISSING]
        return name not in names and OrderedDict.__contains__(output, name)

    def filling(name: str) -> Callable[..., Any]:
        def method(output: Any, *args: Any, **kwargs: Any) -> Any:
            fill(output)
            return getattr(own, name)(output, *args, **kwargs)

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
        for x in dir(own)
        if x.startswith("__") and x not in HARMLESS and callable(getattr(own, x))
    ]
    table: dict[str, Any] = {name: filling(name) for name in special}
    table |= {"__getattribute__": get, "__getitem__": item, "__module__": own.__module__}
    # Code such as ``type(output)(...)`` must make an object of the output's own class.
    table["__new__"] = lambda _, *args, **kwargs: own(*args, **kwargs)
    # By its own name, since classes of outputs register themselves by their names.
    return type(f"{own.__name__}OnDemand", (own,), table)
