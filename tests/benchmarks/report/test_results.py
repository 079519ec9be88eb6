"""The pages of results have the tables of the results that are kept."""

import json

import pytest

from benchmarks.render import summarise
from benchmarks.report.files import PAGES, RESULTS, render_page
from benchmarks.report.machine import ROOT
from benchmarks.report.markdown import body


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_on_the_page_of_tables(path):
    assert f"results/{path.stem}.md\n" in (ROOT / "docs" / "tables.md").read_text("utf-8")
    assert body(summarise(result := json.loads(path.read_text("utf-8"))), result)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_are_up_to_date(page, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    for folder in ("results", "benchmarks/results"):
        (tmp_path / folder).symlink_to(RESULTS)
    (tmp_path / "docs").mkdir()
    text = page.read_text("utf-8")
    copy = tmp_path / ("docs" if page.parent.name == "docs" else "") / page.name
    copy.write_text(text, "utf-8")
    render_page(copy, summarise)
    assert copy.read_text("utf-8") == text
