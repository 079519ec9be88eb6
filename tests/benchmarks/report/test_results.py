"""The results that are kept are rendered, and the page of results has their tables."""

import json

import pytest

from benchmarks.report import files as report


@pytest.mark.parametrize("path", sorted(report.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_rendered(path):
    assert path.with_suffix(".png").is_file()
    found = report.report_of(result := json.loads(path.read_text("utf-8")))
    text = f"# {found.title}\n\n{report.body(found, result)}\n"
    assert path.with_suffix(".md").read_text("utf-8") == text
    page = report.PAGE.read_text("utf-8")
    assert f"<!-- results/{path.name} -->" in page or f"(results/{path.stem}.md)" in page


def test_the_page_is_up_to_date(tmp_path):
    (tmp_path / "results").symlink_to(report.RESULTS)
    page = tmp_path / "page.md"
    text = report.PAGE.read_text("utf-8")
    page.write_text(text, "utf-8")
    report.render_into(page)
    assert page.read_text("utf-8") == text
