"""Tensors that a mapped model is called with, or returns: their devices, and their versions."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.autograd.nodes import before_node
from torchgpipe.autograd.versions import counter_of, version_of
from torchgpipe.devices.streams import has_streams
from torchgpipe.values.division import FlatInput
from torchgpipe.values.marks import tensors_in
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []


class Near:
    """Copy tensors that the caller has on the CPU to a device, each once.

    Later, each such copy would make the host wait for all work that the device has by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def all_of(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, on the device if they are on the CPU, and the device is an accelerator."""
        if not has_streams(self._device):
            return [*tensors]
        for x in tensors:
            if x.device.type == "cpu" and id(x) not in self._moved:
                self._moved[id(x)] = x, x.to(self._device)
        return [self._moved[id(x)][1] if id(x) in self._moved else x for x in tensors]


class CallersTensors:
    """The caller's tensors, as they were in forward.

    Micro-batches are rows of them with versions of their own, so nothing else would notice that
    they have changed since.

    Args:
        given: the arguments of the call.
    """

    def __init__(self, arguments: FlatInput) -> None:
        args, kwargs = arguments.spec.children
        named = [f"args[{k}]" for k in range(len(args.children))] + [*kwargs.context]
        counts = [x.count for x in (*args.children, *kwargs.children)]
        owners = chain(*[[name] * count for name, count in zip(named, counts)])
        # The graph keeps this object, which must not keep tensors: it has version counters alone.
        self._versions = [
            (name, counter_of(x), version_of(x))
            for name, leaf in zip(owners, arguments.leaves)
            for x in tensors_in(leaf)
            if not x.requires_grad
        ]

    def watch(self, output: Any) -> None:
        """Have backward of an output :meth:`verify` them first."""
        for x in leaves_of(output):
            if isinstance(x, Tensor):
                before_node(x, self.verify)

    @uncompiled
    def verify(self, *_: object) -> None:
        """Check, in backward, that they are as they were.

        Raises:
            RuntimeError: one was changed in place.
        """
        for name, counter, version in self._versions:
            if version_of(counter) != version:
                raise RuntimeError(
                    "an input must not be changed in place between a forward and its backward, "
                    f"which may need its values (input: {name}, version: {version_of(counter)}, "
                    f"expected version: {version}); change a clone of it, or change it after "
                    "backward"
                )


def own_versions(whole: set[int], *tensors: Tensor) -> list[Tensor]:
    """Give tensors version counters of their own, except those that every micro-batch gets."""
    return [x if x.requires_grad or id(x) in whole else x.data for x in tensors]


def on_device(device: torch.device | None, value: Any) -> Any:
    """Move a tensor to a device, unless it is still to be computed; keep other values."""
    return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value
