"""The library of virtual accelerators: compiled once, and loaded into a process."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.fx import has_side_effect
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from torchgpipe import _torch
from torchgpipe.testing import device_module

__all__: list[str] = ["load", "UnavailableError"]


SOURCES = Path(__file__).parent / "csrc"

#: The oldest PyTorch with all headers that the library's C++ source includes.
OLDEST = (2, 11)


class UnavailableError(RuntimeError):
    """The error where a process can have no virtual accelerators: it says why, and what to do.

    A test that needs virtual accelerators is best skipped with this message.
    """


def build() -> Path:
    """Compile the library, unless it is in the cache.

    Returns:
        The path of the library, in ``$XDG_CACHE_HOME/torchgpipe`` (``~/.cache/torchgpipe``).

    Raises:
        UnavailableError: there is no compiler, the compiler fails, or PyTorch is too old.
    """
    verify_torch(torch.__version__)
    command, links = [*cxx_compiler(), *flags()], _links()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchgpipe"
    # The name begins with "lib", so that Python does not take the file for a module.
    library = cache / f"libvirtual-{torch.__version__}-{_digest([*command, *links])}.so"
    try:
        if library.exists():
            return library
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            output = Path(folder) / library.name
            _compile([*command, str(SOURCES / "virtual.cpp"), "-o", str(output), *links])
            # Renaming is atomic: another process finds the whole file or none.
            output.replace(library)
    except OSError as error:
        raise UnavailableError(
            "virtual accelerators need a cache that can be written to (cache: "
            f"{cache}, error: {error}); set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return library


def verify_torch(version: str) -> None:
    """Check that a PyTorch is new enough.

    Raises:
        UnavailableError: it is too old.
    """
    numbers = tuple([int(part) for part in version.split(".")[:2]])
    if numbers < OLDEST:
        raise UnavailableError(
            f"virtual accelerators need PyTorch {OLDEST[0]}.{OLDEST[1]} or newer (version: "
            f"{version}); install a newer one"
        )


def cxx_compiler() -> list[str]:
    """The command of a C++ compiler.

    Raises:
        UnavailableError: there is no compiler.
    """
    if sys.platform == "win32":
        raise UnavailableError(
            "virtual accelerators need a compiler that takes the options of GCC (platform: "
            f"{sys.platform}); use Linux, macOS or the Windows Subsystem for Linux"
        )
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            raise UnavailableError(
                "virtual accelerators need the C++ compiler that the environment names (CXX: "
                f"{os.environ['CXX']!r}); unset CXX, or let it name one that is there"
            )
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise UnavailableError(
        "virtual accelerators need a C++ compiler (looked for: g++, clang++, c++); install one "
        "(Debian, Ubuntu: apt install g++; macOS: xcode-select --install), or name it in CXX"
    )


def flags() -> list[str]:
    """The options that the source is compiled with."""
    include = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    return [
        *("-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *("-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")),
    ]


def _links() -> list[str]:
    lib, maps = Path(torch.__file__).parent / "lib", Path("/proc/self/maps")
    standard = ["-undefined", "dynamic_lookup"]
    if sys.platform != "darwin":
        # Link to the libstdc++ that PyTorch has loaded. A compiler that finds only a static one
        # puts it into our library. With two copies in one process, printing a number may crash.
        loaded = maps.read_text() if maps.exists() else ""
        standard = re.findall(r"/.*/libstdc\+\+\.so\S*$", loaded, re.MULTILINE)[:1]
    return [f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}", *standard]


def _digest(command: list[str]) -> str:
    # Machines of several kinds may share a home folder, and so the cache: each has its own digest.
    parts = [*command, torch.version.git_version, sys.platform, platform.machine()]
    digest = hashlib.sha256(" ".join(parts).encode())
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        text = "\n".join(errors[:5] or done.stderr.splitlines()[-5:])
        raise UnavailableError(
            "virtual accelerators must compile with this PyTorch and this compiler (PyTorch: "
            f"{torch.__version__}, compiler: {command[0]}, status: {done.returncode}); use "
            f"another version of either, and report this:\n{text}"
        )


#: The type of the virtual devices, as in ``torch.device("virtual", 0)``.
NAME = "virtual"

#: The most virtual devices that a process can have.
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
    # ``busy`` returns nothing: without this mark PyTorch's tracer would leave it out of graphs.
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
    device_module.register()
    atexit.register(_quiesce, os.getpid())


def _quiesce(process: int) -> None:
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
