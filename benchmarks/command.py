"""What the command lines of all benchmarks have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import RESULTS

__all__ = ["output", "parser"]


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that explains the benchmark, with the option ``--output``.

    Args:
        name: of the benchmark.
        doc: the docstring of its module.
    """
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.json",
        help="where the result goes; .md and .png go beside it (default: into benchmarks/results)",
    )
    return parser


def output(options: argparse.Namespace, name: str) -> Path:
    """Where the result goes: what ``--output`` says, or among the results by its name."""
    path: Path = options.output or RESULTS / f"{name}.json"
    return path
