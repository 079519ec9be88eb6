"""The code of docs/testing.rst runs, and shows what it says; device maps run over two devices."""

import re
from functools import partial
from pathlib import Path

from torchgpipe.balance import map_by_time

DOCS = Path(__file__).parent.parent.parent / "docs"
FILE = DOCS / "testing.rst"


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


def test_device_map_of_two_gpus(run, devices, tmp_path, monkeypatch):
    monkeypatch.setattr("torchgpipe.mapped.choice.map_by_time", partial(map_by_time, timeout=0))
    text = (DOCS / "device_map.rst").read_text("utf-8")
    plain = '{"embed": "cpu", "blocks": "cpu", "head": "cpu"}'
    assert plain in text
    text = text.replace(plain, re.search(r"# With two GPUs: (\{.*\})", text)[1])
    page = tmp_path / "page.rst"
    page.write_text(text.replace('["cpu", "cpu"]', '["virtual:0", "virtual:1"]'), "utf-8")
    names = run(page)
    assert {x.device for x in names["model"].parameters()} == {*devices[:2]}
