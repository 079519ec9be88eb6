"""The training steps of several mini-batches, whose calls of the model go through as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.transformers.model_call import ModelCall

__all__: list[str] = []


# Trainer computes the mini-batches of an optimizer step one by one: forward, loss, backward. Each
# call of the model would fill and drain the pipeline, and a single row cannot be cut. Here the
# calls of all mini-batches become one call, whatever code of the Trainer calls the model::
#
#   training_step 0 ── compute_loss ── model(…) ┐                     ┌→ loss 0
#                                               └ training_step 1 … ┐ │
#                                                 model(…) ┐        │ │
#                                                          one call of all ── loss 1 ─┘
#   one backward of loss 0 + loss 1
#
# A call of the model begins the training step of the next mini-batch. It returns when the last
# mini-batch has come to its call, and all were computed. So in one thread the Trainer's own code
# computes each loss, from the model's output for that mini-batch. ``one_backward`` puts backward
# off until all mini-batches have their losses.


class JoinedStep:
    """Several mini-batches of one optimizer step.

    Args:
        run: runs the training step of a mini-batch, by its number, and returns its loss.
        count: the number of mini-batches.
        compute: computes calls of the model, one for each mini-batch, in one call of the pipeline.
        state: tells the objects of the Trainer's state. If these have changed since a training step
            began, the code in front of the call keeps something there, which the next mini-batch
            would replace: such a call is computed alone.
    """

    def __init__(
        self,
        run: Callable[[int], Tensor],
        count: int,
        compute: Callable[[Sequence[ModelCall]], list[Any]],
        state: Callable[[], Sequence[Any]],
    ) -> None:
        self._run, self._waiting = run, iter(range(count))
        self._compute, self._state = compute, state
        self._losses: dict[int, Tensor] = {}
        self._calls: list[ModelCall] = []
        #: Whether calls of the model are still collected, to be computed together.
        self._is_open = True
        #: The outputs of ``_calls``, once they were computed together; empty if that failed.
        self._outputs: list[Any] = []
        self._before: Sequence[Any] = ()

    def losses(self) -> list[Tensor]:
        """Run all training steps, and return their losses."""
        while self._begin_next():
            pass
        return [self._losses[k] for k in sorted(self._losses)]

    def _begin_next(self) -> bool:
        k = next(self._waiting, None)
        if k is None:
            return False
        self._before = self._state()
        self._losses[k] = self._run(k)
        return True

    def call(self, call: ModelCall) -> Any:
        """Compute a call of the model, with those of all other mini-batches."""
        if not (self._is_open and torch.is_grad_enabled() and is_same(self._state(), self._before)):
            return self._compute([call])[0]
        number = len(self._calls)
        self._calls.append(call)
        while self._is_open and self._begin_next():
            pass
        if self._is_open:
            self._is_open = False
            try:
                self._outputs = self._compute(self._calls)
            except torch.OutOfMemoryError:
                raise
            except Exception:
                # Without outputs each call is computed alone, and raises in its own training step.
                self._outputs = []
        if not self._outputs:
            return self._compute([call])[0]
        output, self._outputs[number] = self._outputs[number], None
        return output


def is_same(state: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether a state has the objects that it had before."""
    return len(state) == len(before) and all(x is y for x, y in zip(state, before))


@contextmanager
def one_backward(accelerator: Any) -> Iterator[None]:
    """Put off the calls of ``accelerator.backward`` in a ``with`` block, for one of their sum.

    Then the backward of all mini-batches is one pipeline, too.
    """
    backward, attributes = accelerator.backward, vars(accelerator)
    before = attributes.get("backward")
    losses: list[Tensor] = []
    options: dict[str, Any] = {}

    def put_off(loss: Tensor, **kwargs: Any) -> None:
        losses.append(loss)
        options.update(kwargs)

    attributes["backward"] = put_off
    try:
        yield
    finally:
        if before is None:
            del attributes["backward"]
        else:
            attributes["backward"] = before
    if losses:
        backward(torch.stack(losses).sum(), **options)
