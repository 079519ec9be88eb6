"""Nodes of the graph: their hooks, and what happens as a backward begins, and as it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from torchgpipe import _torch
from torchgpipe._torch.attributes import is_alone
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe._torch.names import has
from torchgpipe.autograd.fork_join import Unpack, get_phony, pass_on

__all__: list[str] = []


_lock = threading.Lock()
#: The number of hooks that :func:`note_gradients` has registered; :func:`count_hooks` subtracts it.
_noted = 0


def count_hooks() -> int:
    """Count the hooks that others have registered so far, in the whole process."""
    with _lock:
        # PyTorch numbers hooks as they are registered, so the next number is their count so far.
        return int(_torch.count_handles()) - _noted


def note_gradients(node: Any, note: Callable[[Any], None]) -> None:
    """Call a function with the gradients that arrive at a node, after all hooks of others."""
    global _noted
    with _lock:
        node.register_prehook(note)
        _noted += 1


def changes_gradients(node: Any) -> bool:
    """Whether a node has hooks that see, and may change, the gradients that it computes.

    No attribute of a node shows them. But a handle of a further hook refers to the dict of all.
    """
    handle = node.register_hook(_ignore)
    table = handle.hooks_dict_ref()
    handle.remove()
    return bool(table)


def _ignore(*_: Any) -> None:
    """Do nothing."""


def before_node(tensor: Tensor, hook: Callable[..., None]) -> None:
    """Call a function each time the ``grad_fn`` of a tensor, if any, is about to run.

    This is a hook of the tensor, since one of the node takes twice as long on the host. It is also
    called if a backward ends at the tensor.
    """
    node = tensor.grad_fn
    if node is None:
        return
    register = getattr(node, "_register_hook_dict", None)
    if register is None or type(tensor) is not Tensor or tensor._backward_hooks is not None:
        node.register_prehook(hook)
        return
    tensor._backward_hooks = {0: hook}
    register(tensor)
    # The node holds the dict of hooks from here on. Users must not find our hook in the tensor.
    tensor._backward_hooks = None


class without_hooks:
    """Keep hooks of tensors from being called within a ``with`` block.

    Autograd calls the hooks of a tensor with each gradient that it computes. Within a step there is
    one for each micro-batch. The sum passes through the same hooks when it is handed over.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = tensors
        #: Each tensor's dict of hooks that was emptied, with a copy of the hooks to put back.
        self.emptied: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def __enter__(self) -> without_hooks:
        self.add(self.tensors)
        return self

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Keep the hooks of further tensors from being called, until the block ends."""
        for x in tensors:
            table = x._backward_hooks
            if table:
                self.emptied.append((table, dict(table)))
                # clear() and not a new dict, since autograd holds this one.
                table.clear()

    def __exit__(self, *_: object) -> None:
        for table, hooks in reversed(self.emptied):
            added = dict(table)
            table.clear()
            table.update(hooks | added)


# The sequence numbers of nodes, by which autograd chooses among nodes that are ready.
#
# Backward runs the node with the highest number first, which was recorded last. But each thread
# counts for itself. If several threads record one graph, one after another, each must go on from
# the number where the thread before it has stopped.


def next_number() -> int:
    """The sequence number of the node that this thread records next."""
    number: int = _torch.next_node()
    return number


def number_of(node: Node) -> int:
    """The sequence number of a node."""
    number: int = node._sequence_nr()
    return number


def number_from(first: int) -> None:
    """Let the nodes that this thread records from now on have numbers from ``first`` on.

    Only recording a node counts the number up, so unused nodes are recorded (a microsecond each).
    """
    missing = first - next_number()
    if missing > 0 and torch.is_grad_enabled():
        leaf = torch.empty((), device="cpu", requires_grad=True)
        for _ in range(missing):
            leaf.view(())


def between(
    begin: Callable[[], None], end: Callable[[], None], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return outputs after a node that calls functions at both ends of backward.

    Args:
        begin: called before all other nodes of this backward that the outputs depend on.
        end: called when all of this backward is done, and not if it raises.
        *tensors: outputs, of which one requires a gradient.
    """
    # queue_callback is looked up now: PyTorch may lack it, and backward is too late for an error.
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
        # Without queue_callback, the memory stays taken until the thread runs backward again.
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
        # Backward did not raise: a Done, which has no __del__, drains nothing. A flag that __del__
        # reads would not do, since Python swallows a Ctrl-C that comes during a __del__.
        # mypy does not know that the class of an object may change.
        self.__class__ = Done  # type: ignore[assignment]

    @uncompiled
    def __del__(self) -> None:
        drain_queue()


def drain_queue() -> None:
    """Run a backward, which runs all that is left in this thread's queue after one has failed."""
    recorded: list[tuple[Tensor, Tensor, Tensor]] = []
    # Autograd runs the node with the highest number first, and numbers begin anew in each thread.
    # So a node that is recorded in a new thread comes after all nodes that are left.
    thread = threading.Thread(target=lambda: recorded.append(_record()))
    thread.start()
    thread.join()
    torch.autograd.grad(*recorded[0])


def _record() -> tuple[Tensor, Tensor, Tensor]:
    input = torch.zeros((), requires_grad=True)
    return input.clone(), input, torch.ones(())


MESSAGE = (
    "under a schedule, a gradient must come by the loss, since the stages before this one have run "
    "their backward already (gradient of: a value that a layer has kept, such as an auxiliary "
    "loss); have the layer return it as an output, and add it in the loss function"
)


class Enter(Unpack):
    """Begin a graph at tensors, where its backward ends: ``phony, *tensors → *tensors``."""

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
    # dead_end, a node of PyTorch's, takes a third of the time of Enter. But its outputs get version
    # counters of their own: another stage with the same memory would not notice that this stage
    # changes it in place. So dead_end is only for tensors that share memory with no other.
    # guard: changes of what arrives
    unseen = all(map(is_alone, tensors))
    # A tensor that arrives is a leaf. Without detach(), the graph would keep it, to set its .grad.
    # guard: letting go of what arrives
    detached = [x.detach() for x in tensors]
    if unseen:
        _, *outputs = _torch.dead_end(MESSAGE.encode(), 1 + len(detached))(phony, *detached)
        # get_gradient_edge() takes longer: it also serves nodes in Python, and this one is in C++.
        return outputs, [GradientEdge(x.grad_fn, x.output_nr) for x in outputs]
    others: Sequence[Tensor] = Enter.apply(phony, *detached)
    return others, [get_gradient_edge(x) for x in others]
