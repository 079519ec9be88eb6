"""A loss that compares rows: computed once, of what a model's children return for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from torchgpipe.mapped.hugging_face import base_of
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.marks import Chunks
from torchgpipe.values.microbatch import Batch
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


# A contrastive loss compares each row with all others, and a detector divides the loss of boxes by
# the number of boxes in all rows. Neither loss follows from the losses of micro-batches. But the
# model computes it from what its children (towers, bodies, heads) return, and most children compute
# each row by itself. So the model's forward runs twice:
#
#   forward of each micro-batch: children compute, pipelined; what they return is kept and joined
#   forward of all rows, once:   children return what was kept; the code around them has all rows
#
# The second forward computes what needs all rows: similarities, matching, and the loss.


#: For the name of each child, a flag for each of its calls in a forward: whether its outputs for
#: micro-batches can be joined to one for all rows. Such outputs are kept for the second forward.
ByRows = Mapping[str, list[bool]]

#: The model's keyword argument for the kept outputs of its children, in the second forward.
GIVEN = "torchgpipe.children"


class Calls(threading.local):
    """The calls of children in the forward that a thread runs."""

    def __init__(self) -> None:
        #: For the name of each child, an entry for each of its calls: the output that ``record``
        #: keeps or ``repeat`` returns. If the entry is None, ``repeat`` calls the child.
        self.outputs: dict[str, list[Any]] = {}

    def record(self, name: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a child, and keep what it returns."""
        output = child(*args, **kwargs)
        # The containers in the output are copied, since the model may change them afterwards.
        self.outputs.setdefault(name, []).append(map_leaves(lambda x: x, output))
        return output

    def repeat(self, name: str, child: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return what a child has returned for all rows."""
        left = self.outputs.get(name)
        output = left.pop(0) if left else None
        return child(*args, **kwargs) if output is None else output


class Child:
    """A stand-in for a child of a model: its class and attributes, and another call."""

    def __init__(self, child: Any, call: Callable[..., Any]) -> None:
        self._child, self._call = child, call

    # isinstance() takes a stand-in for what its child is. Mypy allows no property of this name.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._child)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    # The model may read the layers of a child that is an nn.Sequential.
    def __len__(self) -> int:
        return len(self._child)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._child)

    def __getitem__(self, key: Any) -> Any:
        return self._child[key]


@contextmanager
def called(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Have a model call something in place of its children within a ``with`` block."""
    base = base_of(model)
    # Children without a forward, such as a ModuleList, are never called, and get no stand-in.
    named = base.named_children()
    children = {name: x for name, x in named if type(x).forward is not nn.Module.forward}
    # Python finds an attribute before nn.Module looks for a submodule: a stand-in hides its child.
    vars(base).update({name: Child(x, partial(call, name, x)) for name, x in children.items()})
    try:
        yield
    finally:
        for name in children:
            del vars(base)[name]


@contextmanager
def recorded(
    model: nn.Module, by_rows: ByRows | None = None, reduce: Callable[[Any], Any] = lambda _: None
) -> Iterator[None]:
    """Have a model return what its children return within a ``with`` block.

    Args:
        model: the model. It returns a part of its own output, and what its children have returned.
        by_rows: which calls of children to keep; by default all.
        reduce: takes the output, and returns that part.
    """
    calls = Calls()

    def begin(*_: Any) -> None:
        calls.outputs = {}

    def end(model: nn.Module, args: Any, output: Any) -> Any:
        outputs, calls.outputs = calls.outputs, {}
        if is_recomputing():
            # Backward runs this hook again, without stand-ins: None leaves the output as it is.
            return None
        if by_rows is not None:
            outputs = {
                name: [x if keep else None for x, keep in zip(outputs[name], keeps, strict=True)]
                for name, keeps in by_rows.items()
            }
        return reduce(output), outputs

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        with called(model, calls.record):
            yield
    finally:
        for handle in handles:
            handle.remove()


def repeated(pipe: MappedGPipe, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
    """Compute a model for all rows, whose children return what they have returned for these.

    Args:
        pipe: the wrapper.
        args: the arguments of all rows.
        kwargs: the same.
        outputs: what children have returned, by :func:`recorded`, joined.
    """
    calls = Calls()

    def begin(model: nn.Module, args: Any, kwargs: Any) -> Any:
        calls.outputs = {name: [*values] for name, values in kwargs.pop(GIVEN).items()}
        return args, kwargs

    mode, training = pipe.checkpoint, pipe.training
    handle = pipe.module.register_forward_pre_hook(begin, with_kwargs=True)
    # A checkpoint would compute the children in backward, and not return their kept outputs. In
    # training mode the wrapper would warn of one micro-batch on several devices.
    pipe.checkpoint, pipe.training = "never", False
    try:
        with called(pipe.module, calls.repeat):
            return pipe.forward(
                *(Chunks([x]) for x in args), **Chunks.of([{**kwargs, GIVEN: outputs}])
            )[0]
    finally:
        pipe.checkpoint, pipe.training = mode, training
        handle.remove()


def rows_of_calls(
    both: dict[str, list[Any]], separate: list[dict[str, list[Any]]], model: nn.Module
) -> ByRows:
    """Find the calls of children that return tensors with the rows, in their first dimension.

    Args:
        both: what children have returned for two rows, or micro-batches.
        separate: the same for each of these alone.
        model: the model.

    Returns:
        These calls; none if other children have most of the model's parameters.
    """
    by_rows: dict[str, list[bool]] = {}
    for name, calls in both.items():
        in_parts = [x.get(name, []) for x in separate]
        if all(len(x) == len(calls) for x in in_parts):
            by_rows[name] = [*map(are_by_rows, calls, *in_parts)]
    children = dict(base_of(model).named_children())
    kept = [children[name] for name, calls in by_rows.items() if all(calls)]
    inside = {p for child in kept for p in child.parameters()}
    count = sum(p.numel() for p in inside)
    return by_rows if 2 * count > sum(p.numel() for p in model.parameters()) else {}


def are_by_rows(both: Any, *separate: Any) -> bool:
    """Whether an output for all rows has those of each of its parts, one behind another."""
    wholes, parts = [*Batch(both)], [[*Batch(x)] for x in separate]
    if not wholes or any(len(x) != len(wholes) for x in parts):
        return False
    return all(
        x.dim() and len(x) == sum(len(y) if y.dim() else 0 for y in pieces)
        for x, pieces in zip(wholes, zip(*parts))
    )
