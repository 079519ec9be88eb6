"""The command line of all benchmarks: ``python -m benchmarks NAME [options]``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

#: Names of the commands. The ``main`` of a command's module takes its arguments.
NAMES = (
    "accelerators",
    "bubbles",
    "choices",
    "controllable_memory",
    "dry_run",
    "dualpipe",
    "graphs",
    "host_bound",
    "large",
    "links",
    "mapped",
    "memory",
    "offload",
    "one_gpu",
    "overhead",
    "projects",
    "render",
    "speed",
    "zero_bubble",
)


def module(name: str) -> str:
    """Name of a command's module, below this package."""
    return name if name == "render" else f"suites.{name}"


def summary(name: str) -> str:
    """First line of a command's docstring, read without importing its module."""
    file = Path(__file__).parent.joinpath(*module(name).split(".")).with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def usage() -> str:
    """Text of ``python -m benchmarks --help``."""
    lines = [f"  {name:19} {summary(name)}" for name in NAMES]
    return "\n".join(["usage: python -m benchmarks NAME [options]", "", *lines, ""]) + (
        "\n`python -m benchmarks NAME --help` lists the options of a command."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, with the other arguments.

    Returns:
        Exit status: 0, or 2 if there is no such command.
    """
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in NAMES:
        print(f"there is no such benchmark (name: {name!r})\n\n{usage()}", file=sys.stderr)
        return 2
    import_module(f"benchmarks.{module(name)}").main(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
