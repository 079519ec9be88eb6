"""The speed of virtual accelerators: described hardware, costs and bandwidths."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from torchgpipe import _torch
from torchgpipe.checks import (
    finite,
    is_number,
    shown,
    verify,
    verify_kind,
    verify_number,
)

__all__ = ["Hardware"]

_ops: Any = torch.ops.virtual_accelerator


#: The kinds of operators for which ``Hardware.efficiency`` may have an entry.
KINDS = ("matmul", "convolution", "attention", "other")

GIB = 2**30

#: The fields of :class:`Hardware` that are times in seconds, and may be 0.
TIMES = ("launch", "host", "host_backward")

#: The share of a rate that operators reach: one for all sizes of operators, or a dict from the size
#: of an operator (in operations or bytes) to its share.
Share: TypeAlias = float | Mapping[float, float]


@dataclass(frozen=True)
class Hardware:
    """The memory and the speed of accelerators that are all alike.

    Args:
        memory: bytes that tensors may take on each device.
        rates: operations a second, by the dtype that is multiplied; a multiplication and its
            addition are two.
        bandwidth: bytes a second that a device reads from and writes to its memory.
        link: bytes a second from one device to another, in each direction.
        host_link: bytes a second from the host to a device, and back.
        launch: seconds that any kernel takes besides.
        efficiency: the share of these rates that operators reach, by kind: ``"matmul"``,
            ``"convolution"`` and ``"attention"``; that of ``"other"``, which moves bytes alone, is
            the share of the bandwidth for all. Without an entry it is 1. A share is a number, or a
            table by the size of an operator, in operations or, for ``"other"``, in bytes; between
            two sizes it goes by their logarithm.
        name: what a report calls the hardware.
        baseline: the measured baseline that the efficiencies come from; empty if there is none.
        host: seconds that a thread of Python takes to issue an operator; 0 for a host that is never
            late.
        host_backward: the same of autograd's threads.
        pageable: bytes a second between a device and memory of the host that is not pinned, which
            a core copies through a buffer; at most ``host_link``.
    """

    memory: int
    rates: Mapping[torch.dtype, float]
    bandwidth: float
    link: float
    host_link: float
    launch: float = 5e-6
    efficiency: Mapping[str, Share] = field(default_factory=dict)
    name: str = "hardware"
    baseline: str = ""
    host: float = 0.0
    host_backward: float = 0.0
    pageable: float = 8e9

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type in ("int", "float"):
                least = {} if entry.name in TIMES else {"above": 0.0}
                rule = "hardware is described by positive numbers, in bytes and seconds"
                value, remedy = getattr(self, entry.name), "take it from the maker's data sheet"
                verify_number(value, rule, entry.name, remedy, **least)
        verify_kind(self.rates, Mapping, "rates are a table", "rates", "pass {torch.float32: 1e13}")
        for dtype, rate in self.rates.items():
            rule, remedy = "rates are operations a second by dtype", "pass {torch.float32: 1e13}"
            verify_kind(dtype, torch.dtype, rule, "rates", remedy)
            verify_number(rate, rule, f"rates[{dtype}]", remedy, above=0)
        for kind, share in self.efficiency.items():
            rule = f"an efficiency is the share of a rate that a kind of operator reaches: {KINDS}"
            verify(kind in KINDS, rule, "efficiency", kind, "name one of these kinds")
            for value in share.values() if isinstance(share, Mapping) else (share,):
                verify_number(value, rule, kind, "pass a number above 0, such as 0.5", above=0)

    def calibrated(self, predicted: float, measured: float, baseline: str) -> Hardware:
        """The same hardware, with efficiencies scaled so that a measured step is predicted right.

        Args:
            predicted: the seconds that this description has predicted for the step.
            measured: the seconds that the step took.
            baseline: what was measured, for the report.
        """
        for name, value in (("predicted", predicted), ("measured", measured)):
            rule, remedy = "a step takes some time", "pass seconds"
            verify_number(value, rule, name, remedy, above=0)
        share = predicted / measured
        efficiency = {kind: _times(self.efficiency.get(kind, 1.0), share) for kind in KINDS}
        # The times of launches and of the host have no efficiency, so they are divided instead.
        times = {name: getattr(self, name) / share for name in TIMES}
        return replace(self, efficiency=efficiency, baseline=baseline, **times)

    @classmethod
    def load(cls, path: str | Path) -> Hardware:
        """Read a file that ``python -m torchgpipe.testing.measure`` has written.

        Raises:
            OSError: it cannot be read.
            ValueError: it has something else.
        """
        entries = json.loads(Path(path).read_text("utf-8"))
        rule, remedy = "a file of hardware has what measure wrote", "measure the hardware again"
        verify(isinstance(entries, dict) and "rates" in entries, rule, "file", str(path), remedy)
        rates = {getattr(torch, name): rate for name, rate in entries.pop("rates").items()}
        shares = {
            kind: {float(size): x for size, x in share.items()} if type(share) is dict else share
            for kind, share in entries.pop("efficiency").items()
        }
        return cls(rates=rates, efficiency=shares, **entries)

    def save(self, path: str | Path) -> None:
        """Write a file that :meth:`load` reads, and that a dry run takes by its name."""
        entries = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        entries["rates"] = {str(dtype)[6:]: rate for dtype, rate in self.rates.items()}
        Path(path).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _times(share: Share, factor: float) -> Share:
    if isinstance(share, Mapping):
        return {size: factor * x for size, x in share.items()}
    return factor * share


F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16

#: The accelerators that a user can name, by their makers' data sheets. Rates are those of dense
#: matrices, in float32 without rounding to TF32, as PyTorch has it by default. ``memory`` is what
#: one process can have. Over 16 lanes PCI Express carries 12 GB/s in its third generation, 25 GB/s
#: in the fourth, and 50 GB/s in the fifth.
NAMED = {
    # NVIDIA A100 Tensor Core GPU data sheet (2021): SXM, NVLink 300 GB/s in each direction.
    "a100-40gb": Hardware(
        memory=int(39.4 * GIB),
        rates={F64: 9.7e12, F32: 19.5e12, BF16: 312e12, F16: 312e12},
        bandwidth=1.555e12,
        link=300e9,
        host_link=25e9,
        name="a100-40gb",
    ),
    # NVIDIA H100 Tensor Core GPU data sheet (2023): SXM, NVLink 450 GB/s in each direction.
    "h100-80gb": Hardware(
        memory=int(79.1 * GIB),
        rates={F64: 34e12, F32: 67e12, BF16: 989e12, F16: 989e12},
        bandwidth=3.35e12,
        link=450e9,
        host_link=50e9,
        name="h100-80gb",
    ),
    # NVIDIA V100 Tensor Core GPU data sheet (2020): SXM2, NVLink 150 GB/s in each direction.
    "v100-16gb": Hardware(
        memory=int(15.7 * GIB),
        rates={F64: 7.8e12, F32: 15.7e12, F16: 125e12},
        bandwidth=0.9e12,
        link=150e9,
        host_link=12e9,
        name="v100-16gb",
    ),
    # NVIDIA Tesla P40 data sheet (2016): the GPU of torchgpipe's paper. Float16 has 1/64 of
    # float32's rate (CUDA C programming guide, arithmetic instructions of compute capability 6.1).
    "p40-24gb": Hardware(
        memory=int(22.3 * GIB),
        rates={F64: 0.367e12, F32: 11.76e12, F16: 0.184e12},
        bandwidth=346e9,
        link=12e9,
        host_link=12e9,
        name="p40-24gb",
    ),
    # NVIDIA Ada GPU architecture (2022), RTX 4090. Rates of half precision are for sums in float32.
    "rtx4090-24gb": Hardware(
        memory=int(23.5 * GIB),
        rates={F64: 1.29e12, F32: 82.6e12, BF16: 165e12, F16: 165e12},
        bandwidth=1.008e12,
        link=25e9,
        host_link=25e9,
        name="rtx4090-24gb",
    ),
}
NAMED["a100-80gb"] = replace(
    NAMED["a100-40gb"], memory=int(79.1 * GIB), bandwidth=2.039e12, name="a100-80gb"
)
# NVIDIA H200 Tensor Core GPU data sheet (2024). The efficiencies are what others have published for
# such GPUs. The host's times are those that fit the steps of one machine in benchmarks/RESULTS.md.
NAMED["h200-140gb"] = replace(
    NAMED["h100-80gb"],
    memory=int(139.0 * GIB),
    bandwidth=4.8e12,
    host_link=55e9,
    efficiency={"matmul": 0.65, "convolution": 0.65, "attention": 0.45, "other": 0.8},
    name="h200-140gb",
    baseline="five training steps on one GPU",
    host=30e-6,
    host_backward=10e-6,
)


def hardware_of(device: Hardware | str) -> Hardware:
    """The hardware that a user has named or described.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(device, Hardware):
        return device
    if isinstance(device, str) and device.endswith(".json"):
        return Hardware.load(device)
    if not isinstance(device, str) or device not in NAMED:
        raise ValueError(
            f"a device is one of {', '.join(sorted(NAMED))}, a measured file that ends with .json, "
            f"or described (device: {shown(device)}); pass torchgpipe.testing.Hardware(...)"
        )
    return NAMED[device]


#: The host as a device: ``CPU`` in a user's table of bandwidths, ``_HOST`` in the compiled library.
CPU, _HOST = "cpu", -1

#: ``LinkEnd`` is an end of a link: a device by its index, the host by ``CPU``, or several of them
#: that share the link. ``Link`` is a link from a source to a target.
LinkEnd: TypeAlias = int | str | tuple[int | str, ...]
Link: TypeAlias = tuple[LinkEnd, LinkEnd]

#: Operators that have kernels of their own on virtual devices. A user can give a cost to none of
#: these but ``copy``. All other operators share a kernel that takes the time of their cost.
_OWN = {
    *("copy", "empty", "empty_strided", "set", "record_stream", "native_dropout"),
    *("_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_efficientzerotensor"),
    *("_fused_sdp_choice", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"),
    *("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"),
}


#: The value of ``costs``, for ``observe()``, with which each operator takes the time that the CPU
#: needs for it.
MEASURED = "measured"


def table_of(costs: Mapping[str, float] | Hardware | str | None) -> dict[str, float]:
    """The costs by operator, if they are neither measured nor those of described hardware.

    Raises:
        ValueError: the costs are another word.
    """
    if isinstance(costs, Hardware):
        return {}
    if isinstance(costs, str):
        if costs != MEASURED:
            raise ValueError(
                "costs are a table, or a word for the CPU's times "
                f"(costs: {costs!r}); use {MEASURED!r}, or such as {{'addmm': 1.0}}"
            )
        return {}
    rule, remedy = "costs are a table, or a word", f"pass {MEASURED!r}, or such as {{'addmm': 1.0}}"
    verify_kind(costs, (Mapping, type(None)), rule, "costs", remedy)
    return dict(costs or {})


def verify_settings(
    costs: dict[str, float],
    bandwidth: Mapping[Link, float],
    jitter: int | None,
    host: float = 0.0,
) -> None:
    """Check that the settings of an observation are possible and have an effect.

    Raises:
        ValueError: a setting is impossible, or has no effect.
    """
    if not (is_number(host) and finite(host) and host >= 0):
        raise ValueError(
            "the host takes a time in milliseconds to issue a piece of work (host: "
            f"{host!r}); leave it out if it takes none"
        )
    for op, cost in costs.items():
        if not (isinstance(op, str) and _reaches_a_device(op)):
            raise ValueError(
                "a cost belongs to an operator that PyTorch's dispatcher gives to a device, and "
                f"that is not made of others (operator: {op!r}, cost: {cost}); a linear layer, for "
                "one, is 'addmm', and a convolution 'convolution'"
            )
        if not (is_number(cost) and finite(cost) and cost >= 0):
            raise ValueError(
                f"a cost must be a time in milliseconds (operator: {op!r}, cost: {cost!r}); leave "
                "out what takes no time"
            )
    devices = torch.accelerator.device_count()
    for link, bytes in bandwidth.items():
        if not (isinstance(link, tuple) and len(link) == 2 and all(map(_are_ends, link))):
            raise ValueError(
                "a link leads from one device to another, each an index or 'cpu', or a tuple of "
                f"those that share it (link: {link!r}, devices: {devices}); name it by a pair, "
                "such as (0, 1) or ((0, 1), 'cpu')"
            )
        if not (is_number(bytes) and bytes > 0):
            raise ValueError(
                "a bandwidth must be positive, in bytes per millisecond (link: "
                f"{link!r}, bandwidth: {bytes!r}); leave out a link that takes no time"
            )
    if jitter is not None and not (type(jitter) is int and 0 <= jitter < 2**31):
        raise ValueError(
            f"jitter must be None or a seed from 0 to 2**31 - 1 (jitter: {jitter!r}); use 0 for a "
            "start, and then others"
        )


def _reaches_a_device(op: str) -> bool:
    name = (op if "::" in op else f"aten::{op}").rstrip("_")
    if name.removeprefix("aten::") in _OWN:
        return name == "aten::copy"
    known = set(_torch.all_operators())
    # PyTorch may call any form of an operator, such as the one in place. So it is enough if one
    # form has a kernel for devices.
    overloads = [
        f"{schema.name}.{schema.overload_name}".rstrip(".")
        for form in (name, f"{name}_")
        for schema in _torch.schemas_of(form)
    ]
    return any(not _is_composite(overload) for overload in overloads if overload in known)


def _is_composite(name: str) -> bool:
    has = _torch.has_kernel
    return has(name, "CompositeImplicitAutograd") or (
        has(name, "CompositeExplicitAutograd") and not has(name, "PrivateUse1")
    )


def _are_ends(value: object) -> bool:
    devices = torch.accelerator.device_count()
    ends = value if isinstance(value, tuple) else (value,)
    known = [x == CPU or (type(x) is int and 0 <= x < devices) for x in ends]
    return bool(known) and all(known)


def put_links(bandwidth: Mapping[Link, float]) -> None:
    """Tell the library the bandwidths of links, in bytes per millisecond."""
    for (source, target), bytes in bandwidth.items():
        _ops.set_bandwidth(_indices(source), _indices(target), bytes)


def put_hardware(hardware: Hardware) -> None:
    """Tell the library how fast the devices are, in milliseconds."""
    _ops.set_speed(hardware.bandwidth / 1e3, hardware.launch * 1e3, hardware.pageable / 1e3)
    for dtype, rate in hardware.rates.items():
        _ops.set_rate(dtype, rate / 1e3)
    for kind, share in hardware.efficiency.items():
        table = share if isinstance(share, Mapping) else {1.0: share}
        sizes = sorted(table)
        _ops.set_efficiency(kind, [*map(float, sizes)], [float(table[size]) for size in sizes])
    if hardware.host or hardware.host_backward:
        _ops.set_issue(hardware.host * 1e3, hardware.host_backward * 1e3)
    ends = [_HOST, *range(torch.accelerator.device_count())]
    for source, target in itertools.permutations(ends, 2):
        rate = hardware.host_link if _HOST in (source, target) else hardware.link
        _ops.set_bandwidth([source], [target], rate / 1e3)


def _indices(end: LinkEnd) -> list[int]:
    """The numbers that the library has for the devices, or the host, at an end of a link."""
    ends = end if isinstance(end, tuple) else (end,)
    return [_HOST if x == CPU else int(x) for x in ends]


def name_of(index: int) -> int | str:
    """The device, or the host, that has a number in the library."""
    return CPU if index == _HOST else index
