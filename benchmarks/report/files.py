"""The files that a suite leaves: its result as JSON, and beside it Markdown.

A result is a dict: what a suite measured, where and how. The suite's ``summarise`` makes a
:class:`Summary` of the result, at once or later (``python -m benchmarks render``). This module is
given that function, since it must not import the suites, which import it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.report.machine import ROOT, describe
from benchmarks.report.markdown import body
from benchmarks.report.summary import Summary

__all__ = ["PAGES", "RESULTS", "Result", "head", "publish", "render", "render_page"]

#: The folder of the results that are kept, and the pages that show their tables.
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "benchmarks" / "RESULTS.md", ROOT / "docs" / "reproduce.md"]

Result = dict[str, Any]
Summarise: TypeAlias = Callable[[Result], Summary]


def head(benchmark: str, arguments: Sequence[str], **more: Any) -> Result:
    """The part of a result that holds for all of its rows.

    Args:
        benchmark: name of the suite.
        arguments: of its command line.
        more: further entries.
    """
    command = " ".join(["python -m benchmarks", benchmark, *arguments])
    return {"benchmark": benchmark, "command": command, "machine": describe(), **more}


def publish(
    path: Path, head: Result, rows: Sequence[Mapping[str, Any]], summarise: Summarise
) -> None:
    """Write a result as JSON, a row per line, render it, and print the Markdown.

    Args:
        path: the JSON file, which is replaced.
        head: what :func:`head` returned, perhaps with further entries.
        rows: the measurements.
        summarise: makes the summary.
    """
    before, after = json.dumps({**head, "rows": [None]}, indent=1).rsplit("null", 1)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{before}{lines}{after}\n", encoding="utf-8")
    print(render(path, summarise))


def render(path: Path, summarise: Summarise) -> str:
    """Write the Markdown of a result beside its JSON.

    Returns:
        The Markdown.
    """
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    summary = summarise(result)
    text = "\n\n".join([f"# {summary.title}", body(summary, result)]) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def render_page(page: Path, summarise: Summarise) -> None:
    """Put the tables of each result between ``<!-- FILE.json -->`` and ``<!-- end -->``.

    Args:
        page: a Markdown file; its names of results are relative to its folder.
        summarise: makes the summary of any result.
    """

    def replaced(match: re.Match[str]) -> str:
        result = json.loads((page.parent / match[1]).read_text(encoding="utf-8"))
        return f"<!-- {match[1]} -->\n{body(summarise(result), result, page=True)}\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\S+\.json) -->\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
