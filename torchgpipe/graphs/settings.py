"""Settings: what a thread, or the process, has set that decides which operators layers come to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchgpipe.devices.streams import device_types

__all__: list[str] = []


class Settings(NamedTuple):
    """The settings of one step.

    Args:
        casts: the types of device whose operators autocast casts.
        others: everything else, to be compared.
    """

    casts: tuple[str, ...]
    others: tuple[Any, ...]


def current_settings() -> Settings:
    """Return what is set in this thread now."""
    casts = tuple([kind for kind in device_types() if torch.is_autocast_enabled(kind)])
    attention = torch.backends.cuda
    return Settings(
        casts,
        (
            *[torch.get_autocast_dtype(kind) for kind in casts],
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            # Attention becomes the operators of whichever way to compute it is allowed.
            attention.flash_sdp_enabled(),
            attention.mem_efficient_sdp_enabled(),
            attention.math_sdp_enabled(),
            attention.cudnn_sdp_enabled(),
        ),
    )
