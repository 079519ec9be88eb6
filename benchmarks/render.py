"""Render results again, and the tables of the pages, without measuring anything."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.report.files import PAGES, RESULTS, Result, render, render_page
from benchmarks.report.summary import Summary


def summarise(result: Result) -> Summary:
    """The summary of any result, by the suite that measured it."""
    summary: Summary = import_module(f"benchmarks.suites.{result['benchmark']}").summarise(result)
    return summary


def main(argv: Sequence[str]) -> None:
    """Render the files in ``argv``, or all results and the pages."""
    parser = argparse.ArgumentParser("python -m benchmarks render", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="*", help="JSON (default: all in benchmarks/results)"
    )
    files = parser.parse_args(argv).files
    for path in files or sorted(RESULTS.glob("*.json")):
        render(path, summarise)
        print(path.with_suffix(".md"))
    for page in [] if files else PAGES:
        render_page(page, summarise)
        print(page)
