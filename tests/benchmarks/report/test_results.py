"""The page of results has the tables of the results that are kept."""

import json

import pytest

from benchmarks.render import summarise
from benchmarks.report.files import PAGE, RESULTS, render_page
from benchmarks.report.markdown import body


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_rendered(path):
    assert path.with_suffix(".png").is_file()
    found = summarise(result := json.loads(path.read_text("utf-8")))
    text = f"# {found.title}\n\n{body(found, result)}\n"
    assert path.with_suffix(".md").read_text("utf-8") == text
    page = PAGE.read_text("utf-8")
    assert f"<!-- results/{path.name} -->" in page or f"(results/{path.stem}.md)" in page


def test_the_page_is_up_to_date(tmp_path):
    (tmp_path / "results").symlink_to(RESULTS)
    page = tmp_path / "page.md"
    text = PAGE.read_text("utf-8")
    page.write_text(text, "utf-8")
    render_page(page, summarise)
    assert page.read_text("utf-8") == text
