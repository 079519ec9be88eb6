"""The prediction: what a dry run says of a step's memory and time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from torchgpipe.show.timeline import Timeline
from torchgpipe.testing.hardware import GIB, Hardware
from torchgpipe.testing.observe import Observation
from torchgpipe.testing.report import Part, Place

__all__ = ["Prediction"]

_ops: Any = torch.ops.virtual_accelerator

#: The number of characters of a picture.
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
            stays = f"what stays between steps takes {self.before[worst] / GIB:.2f} GiB there"
            return f"{stays}: give the device fewer layers, take more devices or freeze weights"
        kept = (self.allocated[worst] - self.before[worst]) / GIB
        return (
            f"the step itself takes {kept:.2f} GiB there: raise chunks, take checkpoint='always' "
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
        for place, allocated, reserved in zip(self.peaks, self.allocated, self.reserved):
            name, title = f"virtual:{place.device}", place.title
            lines.append(
                f"{name:13} {allocated / GIB:9.2f} {reserved / GIB:9.2f} {of:6.1f}  {title}"
            )
        if self.host:
            lines.append(f"pinned memory of the host: {self.host / GIB:.2f} GiB")
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
        sums = {kind: sum(x.time for x in found) for kind, found in kinds.items()}
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

    Args:
        hardware: the hardware that was described.
        seen: the observation of the step.
        state: what was there when it began.
        too_large: the first allocation of the run that did not fit.
    """
    accelerator = torch.accelerator
    devices = [x.device for x in state]
    accounts = [json.loads(_ops.account(device.index)) for device in devices]
    peaks = [
        # Where nothing was allocated in the step, the peak is at its beginning.
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
        too_large=too_large,
        seen=seen,
    )
