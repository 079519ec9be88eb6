"""The machine, the versions and the commit that a result was measured with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

#: The checkout that contains these benchmarks.
ROOT = Path(__file__).resolve().parents[2]


def describe() -> dict[str, Any]:
    """Hardware, versions and date, which every result keeps."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "cores": cores(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "accelerator": None if accelerator is None else accelerator.type,
        "gpu": gpus(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "commit": commit(ROOT),
    }


def heading(machine: dict[str, Any]) -> str:
    """A line of :func:`describe`, to stand above a table."""
    return (
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['date'][:10]}"
    )


def gpus() -> str | None:
    """Number, kind and memory of the CUDA GPUs, or None."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return f"{torch.cuda.device_count()} x {found.name} ({found.total_memory / 2**30:.0f} GiB)"


def cpu() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit(checkout: Path) -> str | None:
    """Commit of a checkout, with a ``+`` if files of the package differ; None if there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "torchgpipe")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
