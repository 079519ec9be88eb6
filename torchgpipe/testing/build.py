"""The library of virtual accelerators, compiled once for each PyTorch and state of its source."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

__all__ = ["UnavailableError"]

SOURCES = Path(__file__).parent / "csrc"

#: The oldest PyTorch with all the headers that the source needs.
OLDEST = (2, 9)


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
    command = [*compiler(), *flags()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchgpipe"
    # The name begins with "lib", so that Python does not take the file for a module.
    library = cache / f"libvirtual-{torch.__version__}-{_digest(command)}.so"
    try:
        if library.exists():
            return library
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            output = Path(folder) / library.name
            _compile([*command, str(SOURCES / "virtual.cpp"), "-o", str(output), *_links()])
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
    found = tuple([int(part) for part in version.split(".")[:2]])
    if found < OLDEST:
        raise UnavailableError(
            f"virtual accelerators need PyTorch {OLDEST[0]}.{OLDEST[1]} or newer (version: "
            f"{version}); install a newer one"
        )


def compiler() -> list[str]:
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
    lib = Path(torch.__file__).parent / "lib"
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    return [f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}", *undefined]


def _digest(command: list[str]) -> str:
    # Machines of several kinds may share a home folder, and so the cache.
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
