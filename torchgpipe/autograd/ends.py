"""Both ends of backward, of a step or a cell: what happens as it begins, and as it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe import _torch
from torchgpipe._torch.dynamo import is_alone, uncompiled
from torchgpipe._torch.names import has
from torchgpipe.autograd.fork_join import get_phony, pass_on

__all__: list[str] = []


# Both ends of backward: what happens when it begins, when it is done, and when it fails.


def between(
    begin: Callable[[], None], end: Callable[[], None], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return outputs after a node that calls functions at both ends of backward.

    Args:
        begin: called before all other nodes of this backward that the outputs depend on.
        end: called when all of this backward is done, and not if it raises.
        *tensors: outputs, of which one requires a gradient.
    """
    # Looked up now, since an error in backward would come too late.
    outputs: tuple[Tensor, ...] = Between.apply(begin, end, _torch.queue_callback, *tensors)
    return outputs


class Between(torch.autograd.Function):
    """``begin, end, queue_callback, *tensors → *tensors``."""

    @staticmethod
    def forward(
        ctx: Any,
        begin: Callable[[], None],
        end: Callable[[], None],
        queue_callback: Callable[[Callable[[], None]], None],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.begin, ctx.end, ctx.queue_callback = begin, end, queue_callback
        return pass_on(ctx, tensors)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # guard: backward after the caller
        ctx.begin()
        # guard: backward before the caller
        ctx.queue_callback(ctx.end)
        return (None, None, None, *grads)


def drain_after_failure(outputs: Iterable[Tensor]) -> None:
    """Make a backward that comes to these outputs, and then raises, leave nothing in its queue.

    On the CPU, the thread that asks for a backward runs it, from a queue of its own. When a node
    raises, the nodes that were due next stay in that queue, and keep the gradients and the graph of
    other micro-batches in memory until the thread runs backward again.
    """
    if not has("queue_callback"):
        # Then the memory is freed by the next backward.
        return
    for tensor in outputs:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_queue_last)


@uncompiled
def _queue_last(_: tuple[Tensor, ...]) -> None:
    _torch.queue_callback(Last())


class Done:
    """A callback that was called when its backward ended."""

    def __call__(self) -> None:
        """Do nothing more."""


class Last(Done):
    """End-of-backward callback.

    If backward raised, autograd deletes the callback without calling it; ``__del__`` then drains
    the queue.
    """

    @uncompiled
    def __call__(self) -> None:
        # Not a flag that __del__ reads: Python would swallow a Ctrl-C that comes within __del__.
        # Types do not know that an object may become one of its base class.
        self.__class__ = Done  # type: ignore[assignment]

    @uncompiled
    def __del__(self) -> None:
        _drain_queue()


class drained_after_failure:
    """Leave nothing in this thread's queue if a backward within a ``with`` block raises."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            _drain_queue()


def _drain_queue() -> None:
    """Run a backward, which runs all that is left in this thread's queue."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    # Autograd runs the node that was recorded last first, by numbers that begin anew in each
    # thread. Recorded in a new thread, this one comes after all that is left.
    thread = threading.Thread(target=lambda: found.append(_record()))
    thread.start()
    thread.join()
    torch.autograd.grad(*found[0])


def _record() -> tuple[Tensor, Tensor, Tensor]:
    input = torch.zeros((), requires_grad=True)
    return input.clone(), input, torch.ones(())


# The beginning of a cell's graph, for cells whose backward runs by itself.


MESSAGE = (
    "under a schedule, a gradient must come by the loss, since the stages before this one have run "
    "their backward already (gradient of: a value that a layer has kept, such as an auxiliary "
    "loss); have the layer return it as an output, and add it in the loss function"
)


class Enter(torch.autograd.Function):
    """Make tensors the beginning of a graph: ``phony, *tensors → *tensors``."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])

    @staticmethod
    @uncompiled
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise RuntimeError(MESSAGE)


def enter(*tensors: Tensor) -> tuple[Sequence[Tensor], list[GradientEdge]]:
    """Make tensors the beginning of a graph.

    Unlike leaves, the tensors that it returns are not kept alive by their graph, and layers may
    change them in place.

    Returns:
        The tensors, and the edges at which backward of the cell ends, with their gradients.
    """
    phony = get_phony(tensors[0].device, requires_grad=True)
    # PyTorch's own node takes a third of the time, but gives tensors new version counters. If
    # another stage has the memory, too, it would not notice that this one changes it in place.
    # guard: changes of what arrives
    unseen = all(map(is_alone, tensors))
    # What arrives is a leaf, which the graph would keep for the gradient.
    # guard: letting go of what arrives
    detached = [x.detach() for x in tensors]
    found: Sequence[Tensor]
    if unseen:
        _, *found = _torch.dead_end(MESSAGE.encode(), 1 + len(detached))(phony, *detached)
    else:
        found = Enter.apply(phony, *detached)
    return found, [get_gradient_edge(x) for x in found]
