"""A dry run: a training step on virtual accelerators that compute shapes alone.

No operator computes a value, and no tensor of a device takes memory. So the step of a model of any
size runs in seconds, and its memory and its time are predicted: memory by the arithmetic of CUDA's
caching allocator, time by a roofline of described hardware.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe import _torch
from torchgpipe.checks import verify_function, verify_number
from torchgpipe.show.tables import in_gib
from torchgpipe.show.timeline import Timeline
from torchgpipe.testing.hardware import GIB, Hardware, hardware_of
from torchgpipe.testing.loading import loaded
from torchgpipe.testing.observe import Observation, observe
from torchgpipe.testing.report import Part, Place

__all__ = ["Prediction", "dry_run"]


_ops: Any = torch.ops.virtual_accelerator

#: The width, in characters, of the printed picture of memory over a step.
WIDTH = 64


class AtStart(NamedTuple):
    """The bytes that were allocated on a device when a step began."""

    device: torch.device
    allocated: int


@dataclass(frozen=True)
class Prediction:
    """The memory and the time of a training step, predicted and not measured.

    Print it to see all of it.

    Args:
        hardware: the hardware that it was predicted for.
        time: the seconds of the step.
        allocated: the most bytes of tensors on each device, each rounded as the allocator does.
        reserved: the most bytes that the allocator took of each device.
        before: the bytes of tensors on each device when the step began: weights and the
            optimizer's state, and gradients if they were kept.
        peaks: where each device had the most bytes of tensors.
        parts: the time of each operator on each device.
        memory: the bytes of tensors over the step, by device: pairs of a time in seconds and the
            most bytes since the time before, in the order in which the host allocated them.
        host: the bytes of pinned memory of the host, for what cells keep there.
        late: the seconds on each device in which it had nothing to do since the host came late; 0
            if the hardware has a host that is never late.
        too_large: the first allocation that does not fit; None if all do. The dry run went on
            without it, so that the other figures say what the step would need.
        seen: the observation of the step, with its spans, transfers and critical path.
    """

    hardware: Hardware
    time: float
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]
    before: tuple[int, ...]
    peaks: tuple[Place, ...]
    parts: Sequence[Part] = field(repr=False)
    memory: Mapping[int, Sequence[tuple[float, int]]] = field(repr=False)
    host: int
    late: tuple[float, ...]
    too_large: Place | None
    seen: Observation = field(repr=False)

    @cached_property
    def timeline(self) -> Timeline:
        """The cells of the step, to be printed or drawn; empty if no wrapper computed any."""
        return self.seen.timeline

    @property
    def fits(self) -> bool:
        """Whether each device has memory enough."""
        return self.too_large is None

    @property
    def remedy(self) -> str:
        """The change by which the step may fit; empty if it does."""
        if self.too_large is None:
            return ""
        worst = self.too_large.device
        if self.before[worst] > 0.9 * self.hardware.memory:
            stays = f"what stays between steps takes {in_gib(self.before[worst])} there"
            return f"{stays}: give the device fewer layers, take more devices or freeze weights"
        kept = in_gib(self.allocated[worst] - self.before[worst])
        return (
            f"the step itself takes {kept} there: raise chunks, take checkpoint='always' "
            "or give the device fewer layers"
        )

    def __str__(self) -> str:
        basis = self.hardware.baseline or "no baseline: rates of the data sheet, nothing measured"
        lines = [
            f"predicted for {len(self.allocated)} x {self.hardware.name}, not measured ({basis})",
            f"predicted time of a step: {self.time:.4g} s",
            f"{'predicted GiB':13} {'allocated':>9} {'reserved':>9} {'of':>6}  at the peak",
        ]
        of = self.hardware.memory / GIB
        for peak, allocated, reserved in zip(self.peaks, self.allocated, self.reserved):
            name, title = f"virtual:{peak.device}", peak.title
            # The unit, GiB, is in the header line above.
            lines.append(
                f"{name:13} {allocated / GIB:9.2f} {reserved / GIB:9.2f} {of:6.1f}  {title}"
            )
        if any(self.late):
            shares = ", ".join([f"{100 * late / self.time:.0f} %" for late in self.late])
            lines.append(f"share of the step in which a device waits for the host: {shares}")
        if self.host:
            lines.append(f"pinned memory of the host: {in_gib(self.host)}")
        lines.append("memory over the step, in tenths of the most that a device has (* is above)")
        lines += [f"virtual:{d:<4} {self._row(samples)}" for d, samples in self.memory.items()]
        lines += self._kinds()
        if self.too_large is not None:
            lines += [f"does not fit: {self.too_large}", self.remedy]
        if self.timeline.spans:
            lines.append(str(self.timeline))
        return "\n".join(lines)

    def _row(self, samples: Sequence[tuple[float, int]]) -> str:
        tenths = [0.0] * WIDTH
        last = 0.0
        for k in range(WIDTH):
            end = self.time * (k + 1) / WIDTH
            inside = [bytes for at, bytes in samples if end - self.time / WIDTH <= at <= end]
            tenths[k] = max(inside, default=last)
            last = next((x for at, x in reversed(samples) if at <= end), last)
        marks = [int(10 * x / self.hardware.memory) for x in tenths]
        return "".join(["*" if mark > 9 else str(mark) for mark in marks])

    def _kinds(self) -> list[str]:
        """A line for each kind of operator, over all devices."""
        kinds: dict[str, list[Part]] = {}
        for part in self.parts:
            kinds.setdefault(part.kind, []).append(part)
        sums = {kind: sum(x.time for x in group) for kind, group in kinds.items()}
        lines = ["predicted seconds of operators, all devices together"]
        for kind in sorted(sums, key=lambda kind: -sums[kind]):
            most = sorted(kinds[kind], key=lambda x: -x.time)
            names = ", ".join([*dict.fromkeys([x.op for x in most])][:3])
            lines.append(f"  {kind:12} {sums[kind]:9.4g}  {names}")
        return lines


def prediction_of(
    hardware: Hardware, seen: Observation, state: Sequence[AtStart], too_large: Place | None
) -> Prediction:
    """Read what the library has counted in the last step, which ended just now.

    What was too large is the first allocation of the whole run that did not fit.
    """
    accelerator = torch.accelerator
    devices = [x.device for x in state]
    accounts = [json.loads(_ops.account(device.index)) for device in devices]
    peaks = [
        # If the peak is at the step's beginning, ``at_peak`` is empty: fill these in.
        replace(seen._place(account["at_peak"][0]), device=x.device.index, bytes=bytes)
        for account, x, bytes in zip(
            accounts, state, map(accelerator.max_memory_allocated, devices)
        )
    ]
    return Prediction(
        hardware=hardware,
        time=seen.makespan / 1e3,
        allocated=tuple([accelerator.max_memory_allocated(x) for x in devices]),
        reserved=tuple([accelerator.max_memory_reserved(x) for x in devices]),
        before=tuple([x.allocated for x in state]),
        peaks=tuple(peaks),
        parts=seen.parts,
        memory={
            device.index: [(at / 1e3, bytes) for at, bytes in account["curve"]]
            for device, account in zip(devices, accounts)
        },
        host=_ops.pinned(),
        late=tuple([_ops.late(device.index) / 1e3 for device in devices]),
        too_large=too_large,
        seen=seen,
    )


# Weightless tensors: large tensors of the host that are allocated, and never written to.
#
# A dry run moves a model to devices without reading it. The operating system gives memory only to
# pages that are written to, so a model on the host takes none while nobody initialises its
# weights.


#: The least bytes of a tensor that a dry run leaves unwritten. Smaller tensors have values.
LARGE = 2**18

#: ``FACTORIES`` are operators that make a tensor of a given size, and ``COPIES`` those that copy
#: one. Large tensors that they return are allocated, and never written to.
FACTORIES = {"rand", "randn", "randint", "zeros", "ones", "full"}
COPIES = {"clone", "_to_copy"}
#: Operators in place that change a tensor's layout, and run even on large tensors. All others in
#: place would write to the tensor, and are left out.
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

    # The type checker does not know this private class of PyTorch.
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
            result = None
            if self.is_wanted:
                result = stand_in(func.overloadpacket.__name__, args, options)
            return func(*args, **options) if result is None else result

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
        # A copy from a device to the host runs, since the link takes time. It writes no values.
        return None
    return first if name.endswith("_") and name not in LAYOUTS else None


#: Which training step is predicted, counted from 1. The first step allocates what later steps have
#: from their beginning, such as an optimizer's state. The second one is left out to be safe.
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
    accelerators = loaded(devices)
    with without_values(hardware, value_read):
        with watched(hardware) as observation, weightless():
            step = make(accelerators)
        verify_function(step, "make returns the step", "step", "return a function that runs it")
        too_large = observation._places()[0]
        for _ in range(COUNTED):
            state = begin_step(accelerators)
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
    # Autograd's threads, one for each device, free gradients between devices in a random order, and
    # so change the peak of memory. So there is one thread, unless times of the host's threads are
    # wanted.
    has_host = bool(hardware.host or hardware.host_backward)
    try:
        with torch.autograd.set_multithreading_enabled(has_host):
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
            # The script has caught the operator's failure, and this error has another cause.
            raise
        layer = failed.layer or "none that is known"
        raise RuntimeError(f"{rule} (operator: {failed.op}, layer: {layer}); {remedy}") from error
