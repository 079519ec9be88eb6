"""Run the tests with pairs of versions of Python and PyTorch, such as ``3.10:2.11.0``.

Each pair has a virtual environment in the folder that ``MATRIX`` names (``.matrix``), which lasts.
An interpreter is ``python3.10`` and the like on PATH, or one of pyenv's. A pair whose interpreter
or PyTorch is not to be had is named in the summary, and does not fail. ``make matrix`` calls this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

#: The oldest and the newest of both, and what is between.
PAIRS = ["3.10:2.11.0", "3.12:2.11.0", "3.11:2.13.0", "3.13:2.13.0", "3.12:2.15"]

ROOT = Path(__file__).resolve().parent.parent
MATRIX = Path(os.environ.get("MATRIX") or ROOT / ".matrix").resolve()

#: The extras that the tests use.
EXTRAS = "benchmarks,demo,examples,test"


class NotAvailableError(Exception):
    """An error: this machine, or the package index, lacks a version."""


def interpreter(version: str) -> str:
    """Find the interpreter of a version, ``3.10`` for one."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [str(path) for path in sorted(pyenv.glob(f"versions/{version}.*/bin/python"))]
    for python in [shutil.which(f"python{version}"), *reversed(found)]:
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        # pyenv puts commands on PATH that fail unless their version is chosen.
        if python and output([python, "-c", code]).strip() == version:
            return python
    raise NotAvailableError(f"no python{version} on PATH or in {pyenv}")


def output(command: list[str]) -> str:
    """Run a command, and return what it prints."""
    return subprocess.run(command, capture_output=True, text=True).stdout


def install(folder: Path, python: str, torch: str) -> Path:
    """Make an environment with this PyTorch and the extras, or bring it up to date.

    Returns:
        Its interpreter.
    """
    # The versions that the tests are known to pass with, save PyTorch's.
    constraints = folder.with_name(f"{folder.name}.txt")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints.parent.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")))

    if not (folder / "bin" / "python").exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(constraints)]
    done = subprocess.run([*pip, f"torch=={torch}"], stderr=subprocess.PIPE, text=True)
    if "No matching distribution found for torch==" in done.stderr:
        shutil.rmtree(folder)
        raise NotAvailableError(f"no PyTorch {torch} for this Python in the package index")
    print(done.stderr, end="", file=sys.stderr)
    done.check_returncode()
    subprocess.run([*pip, f"torch=={torch}", "-e", f"{ROOT}[{EXTRAS}]"], check=True)
    return folder / "bin" / "python"


def run(pair: str) -> str:
    """Run the tests with a pair, and say in a line what came of it."""
    version, _, torch = pair.partition(":")
    try:
        python = install(MATRIX / f"{version}-{torch}", interpreter(version), torch)
    except NotAvailableError as error:
        return f"not available: {error}"
    except subprocess.CalledProcessError as error:
        return f"failed: {' '.join(error.cmd)}"
    command = [str(python), str(ROOT / "tools" / "run_tests.py")]
    last = "nothing"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return f"failed: {last}" if tests.returncode else last


def main() -> int:
    pairs = sys.argv[1:] or PAIRS
    outcomes = {}
    for pair in pairs:
        print(f"\nPython and PyTorch {pair}", flush=True)
        outcomes[pair] = run(pair)
    print()
    for pair, outcome in outcomes.items():
        print(f"{pair:12}{outcome}")
    failed = [x for x in outcomes.values() if x.startswith("failed")]
    # A matrix that could try nothing has shown nothing.
    tried = [x for x in outcomes.values() if not x.startswith("not available")]
    return int(bool(failed) or not tried)


if __name__ == "__main__":
    sys.exit(main())
