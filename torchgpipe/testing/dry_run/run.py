"""The run: three steps of training without values, the third of which counts."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchgpipe.checks import verify_function, verify_number
from torchgpipe.testing.dry_run.prediction import Prediction, State, prediction_of
from torchgpipe.testing.dry_run.weightless import weightless
from torchgpipe.testing.hardware import Hardware, hardware_of
from torchgpipe.testing.loading import loaded
from torchgpipe.testing.observe import Observation, observe
from torchgpipe.testing.report import Place

__all__ = ["dry_run"]

_ops: Any = torch.ops.virtual_accelerator

#: The step that counts. The first one allocates whatever stays, such as an optimizer's state.
COUNTED = 3


def dry_run(
    make: Callable[[list[torch.device]], Callable[[], object]],
    devices: int = 8,
    device: Hardware | str = "a100-40gb",
    *,
    value_read: float | None = None,
) -> Prediction:
    """Predict the memory and the time of a training step, without the accelerators.

    ::

        def make(devices):
            model = GPipe(layers(), balance=[2, 2], devices=devices, chunks=8)
            optimizer = torch.optim.Adam(model.parameters())
            input = torch.rand(256, 3, 224, 224, device=devices[0])

            def step():
                optimizer.zero_grad()
                model(input).mean().backward()
                optimizer.step()

            return step

        print(dry_run(make, devices=2, device="a100-40gb"))

    Run it before the first backward of the process, or behind :func:`load`.

    Args:
        make: takes the devices, makes the model and its optimizer, and returns the step, which
            takes no arguments. Large tensors that ``make`` has on the CPU take no memory.
        devices: the number of devices, from 1 to 64.
        device: what they are: the name of known hardware, or a :class:`Hardware`.
        value_read: the number that each read of a value gives, as ``loss.item()`` is. By default a
            read is an error, since a dry run computes no values.

    Raises:
        RuntimeError: the step reads a value, an operator has no meta kernel, or multiplies a dtype
            for which the hardware has no rate.
        UnavailableError: this process can have no virtual accelerators.
    """
    verify_function(make, "a dry run makes its own step", "make", "pass a function of the devices")
    hardware = hardware_of(device)
    found = loaded(devices)
    with without_values(hardware, value_read):
        with watched(hardware) as observation, weightless():
            step = make(found)
        verify_function(step, "make returns the step", "step", "return a function that runs it")
        too_large = observation._places()[0]
        for _ in range(COUNTED):
            state = begin_step(found)
            with watched(hardware) as observation:
                step()
            too_large = too_large or observation._places()[0]
        return prediction_of(hardware, observation, state, too_large)


@contextmanager
def without_values(hardware: Hardware, value_read: float | None) -> Iterator[None]:
    """Make the virtual accelerators compute shapes alone, with the memory of some hardware."""
    if value_read is not None:
        rule, remedy = "a read gives a number, or None to raise", "pass 0.0"
        verify_number(value_read, rule, "value_read", remedy, least=-float("inf"))
    _ops.set_capacity(hardware.memory)
    _ops.set_hollow(True, value_read)
    try:
        yield
    finally:
        gc.collect()
        _ops.set_hollow(False, None)
        _ops.set_capacity(0)


def begin_step(devices: list[torch.device]) -> list[State]:
    """Begin to count anew what each device takes."""
    gc.collect()
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    return [State(x, torch.accelerator.memory_allocated(x)) for x in devices]


@contextmanager
def watched(hardware: Hardware) -> Iterator[Observation]:
    """Observe a part of a dry run, and tell of an error which layer it belongs to.

    Raises:
        RuntimeError: an operator cannot be run dry.
    """
    failed: Place | None = None
    try:
        with observe(costs=hardware) as observation:
            try:
                yield observation
            except Exception:
                failed = observation._places()[1]
                raise
    except Exception as error:
        if failed is None:
            raise
        rule, _, remedy = failed.detail.partition("; ")
        if rule not in str(error):
            # Whoever read a value before has done without it.
            raise
        layer = failed.layer or "none that is known"
        raise RuntimeError(f"{rule} (operator: {failed.op}, layer: {layer}); {remedy}") from error
