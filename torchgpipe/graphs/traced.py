"""A traced stage, and what has to be as it was for it to be used again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe.ambient.context import current_hooks
from torchgpipe.devices.streams import device_types
from torchgpipe.graphs.parts import BackwardParts, Parts
from torchgpipe.graphs.places import Places
from torchgpipe.graphs.trace import OutputForm
from torchgpipe.recompute.once import updated_in
from torchgpipe.values.structure import Structure

__all__: list[str] = []


class Traced:
    """The graph of a stage for one kind of micro-batch.

    Args:
        parts: the parts of the graph.
        form: the output.
        places: where the stage has its tensors.
    """

    def __init__(self, parts: Parts, form: OutputForm, places: Places) -> None:
        self.parts, self.form = parts, form
        tensors = places.read()
        #: The buffers that the backward reads, as indices into ``places.read()``. A cell raises an
        #: error if one of them changes between its forward and its backward.
        self.lasting = [
            k for k in parts.state_of_backward if not isinstance(tensors[k], nn.Parameter)
        ]
        #: For flags that tell which outputs have a gradient, the parts of the backward.
        self._known: dict[tuple[bool, ...], BackwardParts] = {tuple(form.needs_grad): parts}

    def with_grads(self, grads: Sequence[Tensor | None]) -> BackwardParts:
        """Find the backward in which only these outputs have gradients."""
        key = tuple([x is not None and needed for x, needed in zip(grads, self.form.needs_grad)])
        if key not in self._known:
            self._known[key] = self.parts.without([k for k, x in enumerate(key) if not x])
        return self._known[key]


class Settings(NamedTuple):
    """The settings of a thread and the process that decide which operators layers call.

    Args:
        casts: the types of device whose operators autocast casts.
        fault: why no stage can be a graph; empty if it can.
        others: everything else, to be compared.
    """

    casts: tuple[str, ...]
    fault: str
    others: tuple[Any, ...]


def current_settings() -> Settings:
    """Return what is set in this thread now."""
    casts = tuple([kind for kind in device_types() if torch.is_autocast_enabled(kind)])
    attention = torch.backends.cuda
    modes = [_torch.function_mode_at(k) for k in range(_torch.count_function_modes())]
    fault = ""
    if current_hooks() is not None:
        fault = "hooks for saved tensors are active"
    elif _torch.count_dispatch_modes() or not all(
        isinstance(mode, _torch.DeviceContext) for mode in modes
    ):
        # The graph would contain what the mode does in the trace, and a mode would not see the
        # operators that run within a graph.
        fault = "a mode for functions or operators is active"
    elif torch.is_anomaly_enabled():
        # Anomaly mode would not see the gradients that are computed within a graph.
        fault = "anomaly mode is on"
    return Settings(
        casts,
        fault,
        (
            *[torch.get_autocast_dtype(kind) for kind in casts],
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            # A trace of attention has the operators of the backend that these flags choose.
            *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled()),
            *(attention.math_sdp_enabled(), attention.cudnn_sdp_enabled()),
        ),
    )


#: The most kinds of micro-batches for which a stage is traced, in each state of its layers.
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


class StageState:
    """The graphs of a stage for one state of its layers.

    A stage that is trained, evaluated and trained again comes back to its first state.

    Args:
        modules: the layers, and the loss if it is a module.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.places = Places(modules)
        #: Why the stage cannot become a graph in this state; empty if it can.
        self.fault = "its modules have hooks" if self.places.has_hooks else ""
        if any(map(updated_in, modules)):
            self.fault = "it has state that is updated once per mini-batch"
        self._entries: dict[Any, list[Entry]] = {}
        #: The number of kinds of micro-batches that were traced; at most ``KINDS``.
        self.count = 0
        #: The number of steps that found the layers in this state.
        self.steps = 0
        #: Whether the states before this one lasted for one step each. Then this one is not traced
        #: in its first step, since a trace would most likely serve that step alone.
        self.is_brief = False

    def entry(self, key: Any, structures: Sequence[Structure]) -> Entry:
        """The entry of a kind of micro-batch."""
        entries = self._entries.get(key, ())
        for entry in entries:
            if all(a.equals(b) for a, b in zip(entry.structures, structures)):
                return entry
        if len(self._entries) > 8 * KINDS:
            # Entries of kinds that were never traced are dropped: they may never come again.
            self._entries = {
                key: tried
                for key, some in self._entries.items()
                if (tried := [x for x in some if x.is_tried])
            }
        entry = Entry(structures)
        self._entries[key] = [*self._entries.get(key, ()), entry]
        return entry
