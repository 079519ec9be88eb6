"""The settings of an observation: costs, bandwidths and a seed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from torchgpipe import _torch
from torchgpipe.checks import finite, is_number, verify_kind
from torchgpipe.testing.hardware import Hardware

__all__: list[str] = []

#: The host in a table of bandwidths, and its number in the library.
CPU, _HOST = "cpu", -1

#: An end of a link: a device, the host, or several that share the link.
End: TypeAlias = int | str | tuple[int | str, ...]
Link: TypeAlias = tuple[End, End]

#: Operators with a kernel of their own. The others take the fallback, which counts costs.
_OWN = {
    *("copy", "empty", "empty_strided", "set", "record_stream", "native_dropout"),
    *("_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_efficientzerotensor"),
    *("_fused_sdp_choice", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl"),
    *("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward"),
}


#: The word for the costs that the CPU has.
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
    # An operator has forms in place, out of place and into a given output, which call each other.
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


def put_links(ops: Any, bandwidth: Mapping[Link, float]) -> None:
    """Tell the library how much links carry."""
    for (source, target), bytes in bandwidth.items():
        ops.set_bandwidth(_indices(source), _indices(target), bytes)


def put_hardware(ops: Any, hardware: Hardware) -> None:
    """Tell the library how fast the devices are, in milliseconds.

    Args:
        ops: the functions of the library.
        hardware: the hardware.
    """
    ops.set_speed(hardware.bandwidth / 1e3, hardware.launch * 1e3)
    for dtype, rate in hardware.rates.items():
        ops.set_rate(dtype, rate / 1e3)
    for kind, share in hardware.efficiency.items():
        ops.set_efficiency(kind, share)
    ends = [_HOST, *range(torch.accelerator.device_count())]
    for source, target in itertools.permutations(ends, 2):
        rate = hardware.host_link if _HOST in (source, target) else hardware.link
        ops.set_bandwidth([source], [target], rate / 1e3)


def _indices(end: End) -> list[int]:
    """The numbers that the library has for the devices, or the host, at an end of a link."""
    ends = end if isinstance(end, tuple) else (end,)
    return [_HOST if x == CPU else int(x) for x in ends]


def name_of(index: int) -> int | str:
    """The device, or the host, that has a number in the library."""
    return CPU if index == _HOST else index
