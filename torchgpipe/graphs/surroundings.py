"""Settings of the thread and the process that decide which operators layers call."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchgpipe import _torch
from torchgpipe.devices.streams import device_types

__all__: list[str] = []


class Settings(NamedTuple):
    """The settings of one step.

    Args:
        casts: the types of device whose operators autocast casts.
        replaced: whether modes see, and may replace, what layers call.
        others: everything else, to be compared.
    """

    casts: tuple[str, ...]
    replaced: bool
    others: tuple[Any, ...]


def current_settings() -> Settings:
    """Return what is set in this thread now."""
    casts = tuple([kind for kind in device_types() if torch.is_autocast_enabled(kind)])
    attention = torch.backends.cuda
    modes = [_torch.function_mode_at(k) for k in range(_torch.count_function_modes())]
    return Settings(
        casts,
        bool(_torch.count_dispatch_modes())
        or not all(isinstance(mode, _torch.DeviceContext) for mode in modes),
        (
            *[torch.get_autocast_dtype(kind) for kind in casts],
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            # Attention becomes the operators of a backend that is enabled.
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        ),
    )
