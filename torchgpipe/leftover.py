"""What a backward that raises leaves behind on the CPU: nothing.

There backward is run by the thread that asks for it, from a queue that is the thread's own. When a
function raises, those that were due next stay in the queue, and keep the gradients and the graph
of the other micro-batches in memory until the thread runs backward again. Here it does so at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from torch.autograd import Variable

__all__: list[str] = []


def leave_nothing(outputs: Iterable[Tensor]) -> None:
    """Has a backward that comes by these, and then raises, leave nothing in the queue."""
    for tensor in outputs:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_begin)


def _begin(_: tuple[Tensor, ...]) -> None:
    # A backward that raises lets go of its callbacks, and does not call them.
    Variable._execution_engine.queue_callback(Last())


class Last:
    """Is called when a backward ends, or is deleted without, when it has raised."""

    called = False

    def __call__(self) -> None:
        self.called = True

    def __del__(self) -> None:
        if not self.called:
            empty_queue()


def empty_queue() -> None:
    """Runs a backward, which comes by all that has been left in this thread's queue."""
    output, input, gradient = _oldest()
    torch.autograd.grad(output, input, gradient, retain_graph=True)


@cache
def _oldest() -> tuple[Tensor, Tensor, Tensor]:
    """What autograd takes last of all: it goes by numbers that begin anew in each thread."""
    found = []

    def make() -> None:
        input = torch.zeros((), requires_grad=True)
        found.append((input.clone(), input, torch.ones(())))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]
