"""What a backward that raises leaves behind on the CPU: nothing.

There backward is run by the thread that asks for it, from a queue that is the thread's own. When a
function raises, those that were due next stay in the queue, and keep the gradients and the graph
of the other micro-batches in memory until the thread runs backward again. Here it does so at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import Variable

from torchgpipe._torch.dynamo import uncompiled

__all__: list[str] = []


def leave_nothing(outputs: Iterable[Tensor]) -> None:
    """Has a backward that comes by these, and then raises, leave nothing in the queue."""
    for tensor in outputs:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(_begin)


@uncompiled
def _begin(_: tuple[Tensor, ...]) -> None:
    # A backward that raises lets go of its callbacks, and does not call them.
    Variable._execution_engine.queue_callback(Last())


class Ended:
    """What has been called when a backward ended."""

    def __call__(self) -> None:
        """Nothing is left to do."""


class Last(Ended):
    """What is called when a backward ends; it is deleted without where that has raised."""

    @uncompiled
    def __call__(self) -> None:
        # Ctrl-C would not be heard in a method that Python calls to delete an object.
        # Types do not know that an object may become one of its base class.
        self.__class__ = Ended  # type: ignore[assignment]

    @uncompiled
    def __del__(self) -> None:
        empty_queue()


def empty_queue() -> None:
    """Runs a backward, which comes by all that has been left in this thread's queue."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    # Autograd takes what was recorded last first, by numbers that begin anew in each thread.
    thread = threading.Thread(target=lambda: found.append(_recorded()))
    thread.start()
    thread.join()
    torch.autograd.grad(*found[0])


def _recorded() -> tuple[Tensor, Tensor, Tensor]:
    input = torch.zeros((), requires_grad=True)
    return input.clone(), input, torch.ones(())
