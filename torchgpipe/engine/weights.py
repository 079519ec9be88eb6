"""Weights that layers on several devices share: they are copied to each device once a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchgpipe.autograd.copy import copy, wait
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.autograd.shared import shared
from torchgpipe.autograd.versions import version_of
from torchgpipe.devices.streams import (
    AbstractStream,
    get_device,
    has_streams,
    use_stream,
    wait_stream,
)

__all__: list[str] = []


class Weights:
    """The copies, in one step, of weights that layers on several devices share.

    Args:
        lanes: for each device, the stream from which its weights are copied.
        outside: the caller's stream on each device.
    """

    def __init__(
        self,
        lanes: Mapping[torch.device, AbstractStream],
        outside: Mapping[torch.device, AbstractStream],
    ) -> None:
        self._lanes, self._outside = lanes, outside
        #: Each weight with its aliases, one for each device.
        self._shared: dict[object, tuple[Tensor, dict[torch.device, Tensor]]] = {}

    def bring(
        self, compute: AbstractStream, lane: AbstractStream, weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """Copy weights to a device; weights that are there already get an alias.

        Args:
            compute: the stream that computes with them.
            lane: the stream on which they come.
            weights: the weights.
        """
        return [self._brought(compute, lane, x) for x in weights]

    def _brought(self, compute: AbstractStream, lane: AbstractStream, weight: Tensor) -> Tensor:
        device = get_device(compute)
        if not (has_streams(weight.device) and has_streams(device)):
            return weight.to(device)
        source = self._lanes[weight.device]
        own = self._aliases(weight, source)[device]
        if weight.device == device:
            return own
        # Copied from a lane, since the compute stream there must not wait for the gradient.
        with use_stream(lane):
            arriving = copy(source, lane, own)
        with use_stream(compute):
            return wait(lane, compute, *arriving)[0]

    def _aliases(self, weight: Tensor, lane: AbstractStream) -> dict[torch.device, Tensor]:
        """Make an alias of a weight for each device, ready for a lane of the weight's device."""
        key = id(weight), version_of(weight), needs_backward((weight,))
        if key not in self._shared:
            home, count = self._outside[weight.device], len(self._outside)
            with use_stream(home):
                aliases = shared(weight, count) if needs_backward((weight,)) else (weight,) * count
            self._shared[key] = weight, dict(zip(self._outside, aliases))
            # guard: weights that are lent
            wait_stream(lane, home)
        return self._shared[key][1]
