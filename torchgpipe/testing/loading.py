"""Loading: how a process gets virtual accelerators."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
from torch.fx import has_side_effect
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from torchgpipe import _torch
from torchgpipe.testing import device_module, recurrent
from torchgpipe.testing.build import UnavailableError, build

__all__ = ["load"]

#: The type of the devices: ``torch.device("virtual", 0)``.
NAME = "virtual"

#: The highest number of devices.
MOST = 64

_loaded: int | None = None


def load(devices: int = 8) -> list[torch.device]:
    """Make virtual accelerators the accelerator of this process, for good.

    Load them before the first backward of the process, in which autograd starts its threads, one
    for each device that there is. The first call compiles a library, which takes half a minute, and
    keeps it for other processes. Further calls return the same devices.

    Args:
        devices: the number of accelerators, 1 to 64.

    Returns:
        The devices, ``torch.device("virtual", 0)`` and so on.

    Raises:
        ValueError: the number is out of range, or an earlier call has loaded another number.
        UnavailableError: this process can have no virtual accelerators.
    """
    global _loaded
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST:
        raise ValueError(
            f"there can be 1 to {MOST} virtual devices (devices: {devices!r}); most tests need as "
            "many as there are partitions"
        )
    if _loaded is None:
        _load(devices)
        _loaded = devices
    if _loaded != devices:
        raise ValueError(
            "virtual devices are loaded once in a process (devices: "
            f"{devices}, loaded: {_loaded}); load as many as are needed at first"
        )
    return [torch.device(NAME, i) for i in range(devices)]


def loaded(least: int) -> list[torch.device]:
    """The first virtual accelerators of this process; they are loaded if it has none."""
    if _loaded is not None and _loaded >= least:
        return [torch.device(NAME, i) for i in range(least)]
    return load(least)


def verify_loaded() -> None:
    """Check that this process has virtual accelerators.

    Raises:
        RuntimeError: it has none.
    """
    if _loaded is None:
        raise RuntimeError(
            "there are no virtual accelerators in this process yet; call "
            "torchgpipe.testing.load() at the start of the process"
        )


def _load(devices: int) -> None:
    other = _torch.backend_name()
    if other not in ("privateuseone", NAME):
        raise UnavailableError(
            "virtual accelerators need the place that PyTorch has for one further backend, which "
            f"is taken (backend: {other}); use a process without that backend"
        )
    library = build()
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise UnavailableError(
            "virtual accelerators need a cache from which a library can be loaded (library: "
            f"{library}, error: {error}); delete it, or set XDG_CACHE_HOME to another folder"
        ) from error
    ops: Any = torch.ops.virtual_accelerator
    # PyTorch's tracer leaves out what returns nothing.
    has_side_effect(ops.busy.default)
    ops.start_devices(devices)
    if not _first_backward():
        raise UnavailableError(
            "virtual accelerators must be loaded before the first backward of the process, which "
            "starts autograd's threads (a backward has run already); call "
            "torchgpipe.testing.load() at the start of the process, in a process of its own if "
            "need be"
        )
    ops.start()
    device_module.default_generators = tuple([ops.generator(i) for i in range(devices)])
    rename_privateuse1_backend(NAME)
    _torch.register_device_module(NAME, device_module)
    generate_methods_for_privateuse1_backend(for_storage=True)
    recurrent.register()
    atexit.register(_settle, os.getpid())


def _settle(process: int) -> None:
    """Let autograd's threads come to rest before Python ends; a forked process has none."""
    if os.getpid() == process:
        torch.ops.virtual_accelerator.settle()


def _first_backward() -> bool:
    """Run a backward, which makes autograd start its threads; return whether it was the first."""
    task: list[int] = []
    x = torch.zeros((), device="cpu").requires_grad_()
    with torch.inference_mode(False), torch.enable_grad():
        y = x * 1
    y.register_hook(lambda _: task.append(_torch.graph_task()))
    torch.autograd.backward(y, inputs=[x])
    return task == [0]
