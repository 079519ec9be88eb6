"""The choice of a device map: the user's own, the map of Accelerate, or one that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from torchgpipe.ambient.notes import add_note, noted
from torchgpipe.devices.streams import CPU, Device, accelerators
from torchgpipe.mapped.device_map import place
from torchgpipe.mapped.hugging_face import (
    map_of_accelerate,
    release,
    takes_cache,
    verify_all_there,
    without_cache,
)
from torchgpipe.partition.arguments import checked_devices
from torchgpipe.partition.sample import arguments_of
from torchgpipe.planner.given import Memory, limits_of
from torchgpipe.planner.maps import fitting_maps
from torchgpipe.values.microbatch import scatter
from torchgpipe.values.structure import Arguments

__all__: list[str] = []


def chosen_map(
    model: nn.Module,
    device_map: Mapping[str, Device] | str | None,
    sample: Any = None,
    devices: Iterable[Device] | None = None,
    *,
    memory: Memory | None = None,
    chunks: int = 1,
    checkpoint: str = "except_last",
    rehearse: Callable[[Mapping[str, Device], Arguments], None] | None = None,
) -> Mapping[str, Device]:
    """Return the device map of a model, which loses the hooks of Accelerate.

    Args:
        model: the model.
        device_map: the map, ``"auto"`` to measure the model, or None to take that of Accelerate.
        sample: the arguments of a call, if the model is measured.
        devices: the devices then; by default all accelerators.
        memory: the bytes that each device may use then; by default nine tenths of what it has.
        chunks: the number of micro-batches, for the memory of a step.
        checkpoint: the checkpoint mode, likewise.
        rehearse: runs a model that was measured with the map, and raises what the model raises.
            By default nothing is run.

    Raises:
        TypeError: the sample or the devices are of the wrong kind.
        ValueError: the word is another one, sample or devices are missing, or given beside another
            map, memory is given beside one, or has no limit of a device, the model cannot be
            measured, or does not fit, or it has no map or modules that are offloaded.
    """
    if isinstance(device_map, str) and device_map != "auto":
        raise ValueError(
            "a device map has the names of modules and their devices, or is the word 'auto' "
            f"(device_map: {device_map!r}); pass 'auto' and a sample, or such as {{'encoder': 0, "
            "'decoder': 1}"
        )
    measuring = {"sample": sample, "devices": devices, "memory": memory}
    given = [key for key, x in measuring.items() if x is not None]
    if device_map != "auto" and given:
        raise ValueError(
            "a sample, devices and memory are for a device map that is measured (device_map: "
            f"{type(device_map).__name__}, given: {', '.join(given)}); leave them out, or pass "
            "'auto' as the device map"
        )
    verify_all_there(model)
    if device_map is None:
        found: Mapping[str, Device] = map_of_accelerate(model)
    elif isinstance(device_map, str):
        measured = measured_maps(
            model, sample, devices, memory=memory, chunks=chunks, checkpoint=checkpoint
        )
        found = first_that_runs(model, measured, rehearse)
    else:
        found = device_map
    release(model)
    return found


def first_that_runs(
    model: nn.Module,
    measured: Iterable[tuple[Mapping[str, Device], Arguments]],
    rehearse: Callable[[Mapping[str, Device], Arguments], None] | None,
) -> Mapping[str, Device]:
    """Run a model with one map after another, and return the first one with which it runs.

    Raises:
        Exception: what the model raises with the first map, if it runs with none.
    """
    home = next((x.device for x in model.parameters()), CPU)
    failure: Exception | None = None
    maps = iter(measured)
    while True:
        try:
            found = next(maps, None)
        except ValueError:
            # The first map was possible.
            if failure is None:
                raise
            break
        if found is None:
            break
        device_map, arguments = found
        if rehearse is None:
            return device_map
        # Accelerate's hooks would bring tensors to where they were before.
        release(model)
        try:
            rehearse(device_map, arguments)
        except Exception as error:
            failure = failure or error
            place(model, {"": home})
        else:
            return device_map
    assert failure is not None
    add_note(
        failure,
        "raised by the model with the device map 'auto', which has no map that its code runs "
        "with; pass a device map of your own that keeps together what the code uses together",
    )
    raise failure


def measured_maps(
    model: nn.Module,
    sample: Any,
    devices: Iterable[Device] | None,
    *,
    memory: Memory | None,
    chunks: int,
    checkpoint: str,
) -> Iterator[tuple[Mapping[str, Device], Arguments]]:
    """Measure the blocks of a model with a sample, and spread them over devices.

    Yields:
        Maps, the best one first, and the arguments of a call.
    """
    if devices is None:
        devices = accelerators()
    elif not isinstance(devices, str) and isinstance(devices, Iterable):
        devices = [*devices]
    # The message about something else proposes as many as there are accelerators.
    places = checked_devices(devices, len(devices) if isinstance(devices, list) else 1)
    if not places:
        raise ValueError(
            "the device map 'auto' needs accelerators, or other devices (devices: []); pass such "
            "as devices=['cpu', 'cpu'], or a device map of your own"
        )
    # A value may be used anywhere behind, as a skip is, and predictions are off by as much.
    limits = limits_of(memory, places, has_skips=True)
    if sample is None:
        raise ValueError(
            "the device map 'auto' needs a sample to measure the model with (sample: None); pass "
            "the arguments of a call with as many rows as a micro-batch"
        )
    arguments = arguments_of(sample)
    absent = next((name for name, x in model.named_parameters() if x.is_meta), None)
    if absent is not None:
        raise ValueError(
            "a model on the meta device takes no time that could be measured for the device map "
            f"'auto' ({absent}: meta); load the model first, or pass a device map of your own"
        )
    device = next((x.device for x in model.parameters()), CPU)

    def near(*tensors: Tensor) -> list[Tensor]:
        return [x.to(device) if x.device.type == "cpu" else x for x in tensors]

    (batch,) = scatter(arguments, 1)
    args, kwargs = batch.replace(near(*batch)).value
    if takes_cache(model):
        kwargs = without_cache(kwargs)
    options: dict[str, Any] = {"limits": limits, "chunks": chunks, "checkpoint": checkpoint}
    maps = fitting_maps(places, model, args, kwargs, **options)
    while True:
        with noted("raised by the sample of the device map 'auto'"):
            found = next(maps, None)
        if found is None:
            return
        yield found, Arguments(args, kwargs)
