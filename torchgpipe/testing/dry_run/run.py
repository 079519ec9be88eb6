"""The run: three steps of training without values, on tensors without memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe.checks import verify_function, verify_number
from torchgpipe.testing.dry_run.prediction import AtStart, Prediction, prediction_of
from torchgpipe.testing.hardware import Hardware, hardware_of
from torchgpipe.testing.loading import loaded
from torchgpipe.testing.observe import Observation, observe
from torchgpipe.testing.report import Place

__all__: list[str] = ["dry_run"]


# Weightless tensors of the host: large ones are allocated, and nobody writes to them.
#
# A dry run moves a model to devices without reading it. The operating system gives memory only to
# pages that are written to, so a model on the host takes none while nobody initialises its
# weights.


#: Tensors of fewer bytes are real.
LARGE = 2**18

#: Operators that make a tensor of a given size, those that copy one, and those that change the
#: layout of one in place. Any other operator in place writes to its first argument.
FACTORIES = {"rand", "randn", "randint", "zeros", "ones", "full"}
COPIES = {"clone", "_to_copy"}
LAYOUTS = {
    "resize_",
    "as_strided_",
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "set_",
    "detach_",
}


def weightless() -> AbstractContextManager[Any]:
    """Leave out whatever writes to large tensors of the host, within a ``with`` block.

    Its value has ``is_wanted``, which may be made false before the block ends.
    """

    # A private name of PyTorch, which types do not know.
    class WeightlessMode(_torch.DispatchMode):  # type: ignore[misc]
        is_wanted = True

        def __torch_dispatch__(
            self,
            func: Any,
            types: Sequence[type],
            args: tuple[Any, ...] = (),
            kwargs: Mapping[str, Any] | None = None,
        ) -> Any:
            options = dict(kwargs or {})
            found = None
            if self.is_wanted:
                found = stand_in(func.overloadpacket.__name__, args, options)
            return func(*args, **options) if found is None else found

    mode: AbstractContextManager[Any] = WeightlessMode()
    return mode


def stand_in(name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor | None:
    """The result of an operator without its values, if it makes or changes a large tensor."""
    if torch.device(options.get("device") or "cpu").type != "cpu":
        return None
    dtype: torch.dtype | None = options.get("dtype")
    if name in FACTORIES:
        size = next((x for x in args if isinstance(x, (list, tuple))), ())
        if dtype is None and name == "full":
            dtype = torch.tensor(args[1]).dtype
        dtype = dtype or (torch.int64 if name == "randint" else torch.get_default_dtype())
        return torch.empty(size, dtype=dtype) if prod(size) * dtype.itemsize >= LARGE else None
    first = args[0] if args else None
    if not isinstance(first, Tensor) or first.device.type != "cpu" or first.nbytes < LARGE:
        return None
    if name in COPIES:
        return torch.empty_like(first, dtype=dtype)
    if name == "copy_" and args[1].device.type != "cpu":
        # What comes from a device without values writes none, and takes the time of the link.
        return None
    return first if name.endswith("_") and name not in LAYOUTS else None


# The run: three steps of training without values, the third of which counts.


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

    Run it before the first backward of the process, or after :func:`load`.

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


def begin_step(devices: list[torch.device]) -> list[AtStart]:
    """Begin to count anew what each device takes."""
    gc.collect()
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    return [AtStart(x, torch.accelerator.memory_allocated(x)) for x in devices]


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
