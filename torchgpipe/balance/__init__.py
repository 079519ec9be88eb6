"""Balancing: how many layers each partition should take, by the time or memory of each layer.

::

    balance = balance_by_time(len(devices), module, sample)
    model = GPipe(module, balance, devices=devices, chunks=8)

For a model that is no ``nn.Sequential``, :func:`map_by_time` and :func:`map_by_size` propose a
device map: which device computes which of its blocks, in the order of their calls. A block is a
module that is kept whole: an entry of an ``nn.ModuleList`` or an ``nn.Sequential``, a class that
the model says not to split, and whatever has parameters beside these.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchgpipe.ambient.notes import add_note
from torchgpipe.balance import blockpartition as blockpartition
from torchgpipe.balance.profile import profile_layers
from torchgpipe.checks import MOST, has_entries, listed, verify
from torchgpipe.devices.streams import Device
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.partition.arguments import (
    MISSING,
    checked_timeout,
    positive_int,
    verify_a_module,
    verify_scale,
)
from torchgpipe.partition.split import verify_module
from torchgpipe.planner.blocks import Measure, recorded, timed
from torchgpipe.planner.cuts import evenest
from torchgpipe.planner.maps import proposed

__all__ = ["balance_by_time", "balance_by_size", "map_by_time", "map_by_size"]


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = 1.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the time that each layer takes for forward and backward.

    The slowest partition sets the pace of a pipeline. With this balance the slowest partition is as
    fast as it can be. Among such balances it is the evenest one. All layers are measured on one
    device, so the devices should be alike, and in train mode, whatever the mode of the module.

    Args:
        partitions: how many partitions to make.
        module: the layers.
        sample: an input of the size of a micro-batch, on any device: the argument of the first
            layer.

    Keyword Args:
        args: the arguments of the first layer after the sample, or all of them without a sample.
        kwargs: the keyword arguments of the first layer.
        timeout: how many seconds to measure. A warm-up comes on top, and each layer runs three
            times at least.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        How many layers each partition takes, for ``GPipe(module, balance)``.

    Raises:
        TypeError: the module could not be wrapped, or there is no input.
        ValueError: there are fewer layers than partitions, or no layer takes any time.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    partitions = _verified(partitions, module)
    checked_timeout(timeout)
    options: Any = {"timeout": timeout, "device": device, "progress": progress}
    profile = profile_layers(module, sample, args=args, kwargs=kwargs, **options)
    return evenest(profile.times(), partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
    progress: bool = False,
) -> list[int]:
    """Balance by the memory that each layer takes in training.

    The cost of a layer is the memory of its parameters times ``param_scale``, plus the memory that
    it keeps of one micro-batch for backward, the output included. ``param_scale`` is how many times
    the memory of a parameter it takes to train it, itself and its gradient included: 2 for SGD, 3
    with momentum, 4 for Adam.

    ``input`` has the size of a mini-batch, of which ``chunks`` micro-batches are made. Layers run
    one of them; with the default they run the whole mini-batch, for which a device may lack the
    memory. All else is as in :func:`balance_by_time`.
    """
    partitions = _verified(partitions, module)
    verify_scale(param_scale)
    options: Any = {"chunks": chunks, "timeout": None, "device": device, "progress": progress}
    try:
        profile = profile_layers(module, input, args=args, kwargs=kwargs, **options)
    except RuntimeError as error:
        # On the CPU there is no class of its own for it.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            rows = "the whole mini-batch" if chunks == 1 else "one micro-batch"
            add_note(
                error,
                f"balance_by_size ran {rows} through each layer (chunks: {chunks}); pass the "
                "chunks that you will train with, or more of them",
            )
        raise
    costs = [
        layer.at(profile.rows).left + layer.weights.parameters * param_scale
        for layer in profile.layers
    ]
    return evenest(costs, partitions)


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
    whose slowest device is as fast as can be, it is the evenest one.

    Args:
        devices: the devices, which should be alike.
        model: any module. Neither its parameters nor its buffers change.
        *args: the arguments of the model, of the size of a micro-batch.

    Keyword Args:
        no_split: names of classes whose modules are kept whole. By default those that the model
            names itself, as models of Transformers do.
        timeout: as in :func:`balance_by_time`.
        **kwargs: the keyword arguments of the model.

    Returns:
        The devices by the names of modules, for ``MappedGPipe(model, device_map)``.

    Raises:
        ValueError: there are fewer blocks than devices, or no block takes any time.
    """
    checked_timeout(timeout)
    return _map(devices, model, no_split, lambda x: timed(model, x, args, kwargs, timeout))


def map_by_size(
    devices: Sequence[Device],
    model: nn.Module,
    *args: Any,
    no_split: Collection[str] | None = None,
    param_scale: float = 2.0,
    **kwargs: Any,
) -> dict[str, Device]:
    """Propose a device map by the memory that each block takes in training.

    The cost of a block is the memory of its parameters times ``param_scale``, as in
    :func:`balance_by_size`, plus the memory that it keeps of the sample for backward. All else is
    as in :func:`map_by_time`.
    """
    verify_scale(param_scale)

    def measure(blocks: dict[str, nn.Module]) -> dict[str, float]:
        sizes: dict[str, float] = {}
        for call in recorded(model, blocks, args, kwargs):
            if call.block is not None:
                weights = sum(x.nbytes for x in blocks[call.block].parameters())
                sizes.setdefault(call.block, param_scale * weights)
                sizes[call.block] += call.kept
        return sizes

    return _map(devices, model, no_split, measure)


def _map(devices: Any, model: Any, no_split: Any, measure: Measure) -> dict[str, Device]:
    """Check the arguments of a map, and spread the blocks of a model by what they cost."""
    rule, remedy = "devices must be a sequence of devices", "pass such as [0, 1], or ['cpu'] * 2"
    places = listed(devices, rule, "devices", remedy)
    for place in places:
        number = isinstance(place, int) and not isinstance(place, bool) and 0 <= place < MOST
        named = isinstance(place, torch.device) or (isinstance(place, str) and place)
        verify(number or named, rule, "device", place, remedy, TypeError)
    verify(places, "devices must be at least one", "devices", devices, remedy)
    verify_a_module(model, "model")
    rule = "no_split must be names of classes"
    is_list = isinstance(no_split, Collection) and not isinstance(no_split, str | bytes)
    valid = is_list and has_entries(no_split) and all(isinstance(x, str) for x in no_split)
    remedy = "pass such as ['Block']"
    verify(no_split is None or valid, rule, "no_split", no_split, remedy, TypeError)
    return proposed(places, Wholes.of(model, no_split), measure)


def _verified(partitions: Any, module: nn.Sequential) -> int:
    """The number of partitions as an integer, before any time is spent on measuring."""
    verify_module(module)
    number: int = positive_int(partitions) or partitions
    evenest([0.0] * len(module), number)
    return number
