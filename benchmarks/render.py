"""Renders results again, and the tables of RESULTS.md; measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.files import PAGE, RESULTS, render, render_into


def main(argv: Sequence[str]) -> None:
    """Renders the files that are named, or all results and the page."""
    parser = argparse.ArgumentParser("python -m benchmarks render", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="*", help="JSON (default: all in benchmarks/results)"
    )
    files = parser.parse_args(argv).files
    for path in files or sorted(RESULTS.glob("*.json")):
        render(path)
        print(path.with_suffix(".md"))
    if not files:
        render_into(PAGE)
        print(PAGE)
