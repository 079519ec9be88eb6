"""A traced stage, and what has to be as it was for it to be used again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Node

from torchgpipe import _torch
from torchgpipe.devices.streams import device_types
from torchgpipe.graphs.gate import gate
from torchgpipe.graphs.joint import tensors_of
from torchgpipe.graphs.parts import Parts
from torchgpipe.graphs.places import Places, UntraceableError
from torchgpipe.graphs.trace import OutputForm
from torchgpipe.values.structure import Structure

__all__: list[str] = []


# A traced stage: a graph, and what takes its arguments apart and puts its results together.


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
            with gate.tracing():
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


# Settings of the thread and the process that decide which operators layers call.


class Settings(NamedTuple):
    """The settings of one step.

    Args:
        casts: the types of device whose operators autocast casts.
        replaced: whether modes see, and may replace, what layers call.
        others: everything else, to be compared.
    """

    casts: tuple[str, ...]
    replaced: bool
    others: tuple[Any, ...]


def current_settings() -> Settings:
    """Return what is set in this thread now."""
    casts = tuple([kind for kind in device_types() if torch.is_autocast_enabled(kind)])
    attention = torch.backends.cuda
    modes = [_torch.function_mode_at(k) for k in range(_torch.count_function_modes())]
    return Settings(
        casts,
        bool(_torch.count_dispatch_modes())
        or not all(isinstance(mode, _torch.DeviceContext) for mode in modes),
        (
            *[torch.get_autocast_dtype(kind) for kind in casts],
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            # Attention becomes the operators of a backend that is enabled.
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        ),
    )


# States of layers: modes, numbers in attributes, and kinds of weights decide what is computed.
#
# A graph stands for the layers in one state. A stage that is trained, evaluated and trained again
# comes back to its first state, and to the graphs of that.


#: The number of kinds of micro-batches, in each state, that become graphs.
KINDS = 32


@dataclass
class Entry:
    """One kind of micro-batch.

    Args:
        structures: the structures of its parts, and that of the loss's further arguments.
        has_run: whether the layers have run on this kind.
        is_tried: whether it was tried to trace it.
        traced: the graph; None for eager cells.
    """

    structures: Sequence[Structure]
    has_run: bool = False
    is_tried: bool = False
    traced: Traced | None = None

    def fits(self, structures: Sequence[Structure]) -> bool:
        """Whether the structures of a micro-batch fit; its tensors are compared elsewhere."""
        return all(a.equals(b) for a, b in zip(self.structures, structures))


class StageState:
    """The graphs of a stage for one state of its layers.

    Args:
        places: the layers, and the loss if it is a module, in that state.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self._entries: dict[Any, list[Entry]] = {}
        #: The number of kinds of micro-batches that became graphs, or were tried.
        self.count = 0
        #: The number of steps in which the layers were in this state, and whether the state will
        #: not last long enough for a trace.
        self.steps, self.is_brief = 0, False

    def entry(self, key: Any, structures: Sequence[Structure]) -> Entry:
        """The entry of a kind of micro-batch."""
        entries = self._entries.get(key, ())
        for entry in entries:
            if entry.fits(structures):
                return entry
        if len(self._entries) > 8 * KINDS:
            # Kinds that came once are forgotten.
            self._entries = {
                key: found
                for key, some in self._entries.items()
                if (found := [x for x in some if x.is_tried])
            }
        entry = Entry(structures)
        self._entries[key] = [*self._entries.get(key, ()), entry]
        return entry

    @property
    def traced(self) -> list[Traced]:
        """All graphs."""
        return [x.traced for some in self._entries.values() for x in some if x.traced]
