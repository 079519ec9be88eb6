"""Results become JSON and Markdown."""

import json

import pytest

from benchmarks.render import summarise
from benchmarks.report import files
from benchmarks.report.summary import Summary, Table


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Publish a result of two rows."""

    def publish():
        tables = [Table(["name", "seconds"], [["one", "1.5 (2)"], ["two", None]], "Times:")]
        found = Summary("A title", tables, "A note.")
        monkeypatch.setattr("benchmarks.suites.bubbles.summarise", lambda result: found)
        path = tmp_path / "folder" / "result.json"
        head = files.head("bubbles", ["--n", "2"], left_out={"three": "no such thing"})
        files.publish(path, head, [{"name": "one"}, {"name": "two"}], lambda result: found)
        return path

    return publish


def test_publish(publish, capsys):
    published = publish()
    text = published.with_suffix(".md").read_text("utf-8")
    assert text.splitlines()[0] == "# A title"
    assert "`python -m benchmarks bubbles --n 2`" in text
    assert text.split("Times:\n\n")[1].startswith(
        "| name | seconds |\n| :--- | ------: |\n| one  | 1.5 (2) |\n| two  | not run |\n\nA note."
    )
    assert "Not run: three: no such thing" in text
    assert text in capsys.readouterr().out
    result = json.loads(published.read_text("utf-8"))
    assert {"torch", "python", "cpu", "cores", "commit"} <= result["machine"].keys()
    lines = published.read_text("utf-8").splitlines()
    assert [line.strip(" ,]") for line in lines if '"name"' in line] == [
        '{"name": "one"}',
        '{"name": "two"}',
    ]


def test_tables_of_a_page(publish, tmp_path):
    publish()
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- folder/result.json -->\nstale\n<!-- end -->\nb\n", "utf-8")
    files.render_page(page, summarise)
    text = page.read_text("utf-8")
    assert "stale" not in text
    assert text.startswith("a\n<!-- folder/result.json -->\n")
    assert text.endswith("Not run: three: no such thing\n<!-- end -->\nb\n")
    files.render_page(page, summarise)
    assert page.read_text("utf-8") == text
