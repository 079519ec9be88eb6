"""The code of docs/testing.rst runs, and shows what it says."""

from pathlib import Path

FILE = Path(__file__).parent.parent.parent / "docs" / "testing.rst"


def test_guide(run, devices, tmp_path, monkeypatch, capsys):
    # The devices of this process are loaded already.
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    names = run(FILE, path=tmp_path / "trace.json")
    assert names["path"].stat().st_size > 1000
    printed = capsys.readouterr().out.splitlines()
    text = FILE.read_text("utf-8")
    for line in printed[:3]:
        # The number of a stream is whichever comes next.
        assert line.split(" stream ")[0] in text
    assert any("waited from" in line for line in printed)
