"""Proposals of device maps: which device computes which module of any model.

The model's own forward runs on a sample, and each of its blocks is measured there. A block is a
module that is kept whole: an entry of an ``nn.ModuleList`` or an ``nn.Sequential``, a class that
the model says not to split, and whatever has parameters beside these. Blocks go to the devices in
the order in which they are called, so that the device with the most to do has as little as
possible.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe.checks import MOST, listed, verify
from torchgpipe.devices.streams import Device
from torchgpipe.mapped.wholes import Wholes
from torchgpipe.partition.arguments import checked_timeout, verify_a_module, verify_scale
from torchgpipe.planner.blocks import Times, proposed, refined, sizes_of, timed

__all__ = ["map_by_size", "map_by_time"]


def map_by_time(
    devices: Sequence[Device],
    model: nn.Module,
    *args: Any,
    no_split: Collection[str] | None = None,
    timeout: float = 1.0,
    **kwargs: Any,
) -> dict[str, Device]:
    """Propose a device map by the time that each block takes.

    ::

        device_map = map_by_time([0, 1, 2, 3], model, input_ids=rows_of_a_micro_batch)
        pipe = MappedGPipe(model, device_map, chunks=8)

    Forwards are measured, where the model is; backwards are taken to be in proportion. Of the maps
    whose slowest device is as fast as can be, give or take the noise of the measurement, it is the
    evenest one.

    Args:
        devices: the devices, which should be alike.
        model: any module. Neither its parameters nor its buffers change.
        *args: the arguments of the model, of the size of a micro-batch.

    Keyword Args:
        no_split: names of classes whose modules are kept whole. By default those that the model
            names itself, as models of Transformers do.
        timeout: how many seconds to measure. A warm-up comes on top, and the model runs three times
            at least.
        **kwargs: the keyword arguments of the model.

    Returns:
        The devices by the names of modules, for ``MappedGPipe(model, device_map)``.

    Raises:
        ValueError: there are fewer blocks than devices, or no block takes any time.
    """
    places = _places(devices, model, no_split)
    checked_timeout(timeout)

    def measure(blocks: dict[str, nn.Module]) -> Times:
        return timed(model, *args, blocks=blocks, timeout=timeout, **kwargs)

    return proposed(places, *refined(measure, Wholes.of(model, no_split), len(places)))


def _places(devices: Any, model: Any, no_split: Any) -> list[Device]:
    """Check the arguments of a map, and return the devices.

    Raises:
        TypeError: one of them is of the wrong kind.
        ValueError: there is no device.
    """
    rule, remedy = "devices must be a sequence of devices", "pass such as [0, 1], or ['cpu'] * 2"
    places = listed(devices, rule, "devices", remedy)
    for place in places:
        number = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < MOST
        named = isinstance(place, torch.device) or (isinstance(place, str) and place)
        verify(number or named, rule, "device", place, remedy, TypeError)
    verify(places, "devices must be at least one", "devices", devices, remedy)
    verify_a_module(model, "model")
    rule = "no_split must be names of classes"
    valid = no_split is None or (
        isinstance(no_split, Collection)
        and not isinstance(no_split, str | bytes)
        and all(isinstance(x, str) for x in no_split)
    )
    verify(valid, rule, "no_split", no_split, "pass such as ['Block']", TypeError)
    return places


def map_by_size(
    devices: Sequence[Device],
    model: nn.Module,
    *args: Any,
    no_split: Collection[str] | None = None,
    param_scale: float = 2.0,
    **kwargs: Any,
) -> dict[str, Device]:
    """Propose a device map by the memory that each block takes in training.

    The cost of a block is the memory of its parameters times ``param_scale``, plus the memory that
    it keeps of the sample for backward.

    Args:
        devices: the devices, which should be alike.
        model: any module. Neither its parameters nor its buffers change.
        *args: the arguments of the model, of the size of a micro-batch.

    Keyword Args:
        no_split: as in :func:`map_by_time`.
        param_scale: how many times the memory of a parameter it takes to train it: 2 for SGD, 3
            with momentum, 4 for Adam.
        **kwargs: the keyword arguments of the model.

    Returns:
        The devices by the names of modules.

    Raises:
        ValueError: there are fewer blocks than devices.
    """
    places = _places(devices, model, no_split)
    verify_scale(param_scale)

    def measure(blocks: dict[str, nn.Module]) -> Times:
        return Times(blocks, sizes_of(model, blocks, param_scale, args, kwargs), {})

    return proposed(places, *refined(measure, Wholes.of(model, no_split), len(places)))
