"""A traced stage: a graph, and what takes its arguments apart and puts its results together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.fx import Node

from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.joint import tensors_of
from torchgpipe.graphs.parts import Parts
from torchgpipe.graphs.places import UntraceableError
from torchgpipe.graphs.trace import OutputForm

__all__: list[str] = []


class Traced:
    """The graph of a stage for one kind of micro-batch.

    Args:
        parts: the parts of the graph.
        form: the output.
        tensors: the parameters and buffers that the stage was traced with.
        trace: traces the stage once more, for gradients of fewer outputs.
    """

    def __init__(
        self,
        parts: Parts,
        form: OutputForm,
        tensors: Sequence[Tensor],
        trace: Callable[[Sequence[bool]], Parts],
    ) -> None:
        self.parts, self.form, self._trace = parts, form, trace
        #: The indices of buffers that the backward needs as they were in the forward.
        self.lasting = [
            k for k in parts.state_of_backward if not isinstance(tensors[k], nn.Parameter)
        ]
        whole = tuple(form.needs_grad)
        #: The parts for gradients of some outputs, and which of the saved values they take.
        self._known: dict[tuple[bool, ...], tuple[Parts, Sequence[int]]] = {
            whole: (parts, range(len(parts.saved)))
        }

    def with_grads(self, grads: Sequence[Tensor | None]) -> tuple[Parts, Sequence[int]]:
        """Find the parts for a backward in which only these outputs have gradients.

        Zeros for the other outputs would be wrong: a weight that gets no gradient must have None,
        and some derivatives, as that of a square root at 0, turn a gradient of 0 into NaN.
        """
        key = tuple([x is not None and needed for x, needed in zip(grads, self.form.needs_grad)])
        if key not in self._known:
            with gate:
                # Another thread may have been first.
                if key not in self._known:
                    self._known[key] = self._traced(key)
        return self._known[key]

    def _traced(self, key: Sequence[bool]) -> tuple[Parts, Sequence[int]]:
        try:
            parts = self._trace(key)
            places = {_identity(x): k for k, x in enumerate(self.parts.saved)}
            # A backward from fewer outputs needs no more of the forward than one from all.
            if not all(_identity(x) in places for x in parts.saved):
                raise UntraceableError("its forward was another one when it was traced again")
        except UntraceableError as error:
            raise RuntimeError(
                "a stage that is a graph must be traceable for gradients of some of its "
                f"outputs, too (reason: {error}); use stages='eager'"
            ) from error
        return parts, [places[_identity(x)] for x in parts.saved]


def _identity(node: Node) -> tuple[object, ...]:
    """Name a node such that it has the same name in another trace of the same forward."""
    kinds = [(x.shape, x.dtype) for x in tensors_of(node)]
    return node.name, node.target if node.op == "call_function" else "", *kinds
