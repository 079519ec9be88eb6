"""What the package exports, how large its heart is, and that its guide is true."""

import re
import sys
from pathlib import Path
from textwrap import dedent

from torchgpipe import schedule

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/schedule.rst"


def test_exports():
    public = {
        name
        for name, value in vars(schedule).items()
        if getattr(value, "__module__", "").startswith("torchgpipe.schedule.")
    }
    assert public == {*schedule.__all__}
    assert len(schedule.__all__) == len(public)
    for name in schedule.__all__:
        assert getattr(schedule, name).__doc__


def test_language_dependencies_validator_and_simulator_are_small():
    rooms = ("program", "language", "costs", "validator", "simulator")
    folder = Path(schedule.__file__).parent
    lines = [(folder / f"{room}.py").read_text("utf-8").splitlines() for room in rooms]
    assert sum(map(len, lines)) < 500


def test_the_guide_prints_what_it_says(capsys):
    block = r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)"
    output = r"(?:[^\n]+\n)*?[^\n]*::\n\n((?:   .*\n|\n)+)"
    names = {}
    found = re.findall(block + output, GUIDE.read_text("utf-8"))
    assert len(found) == GUIDE.read_text("utf-8").count(".. code-block:: python")
    for code, expected in found:
        exec(compile(dedent(code), str(GUIDE), "exec"), names)
        assert capsys.readouterr().out.strip() == dedent(expected).strip()
    first = [line for line in found[0][0].splitlines() if line.strip()]
    assert len(first) <= 20


def test_the_pictures_of_the_guide_are_up_to_date(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/schedules")
    import draw

    monkeypatch.delitem(sys.modules, "draw")
    draw.draw(tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (ROOT / "docs/schedules").glob("*.svg")}
    assert made == {*re.findall(r"\.\. image:: schedules/(\S+)", GUIDE.read_text("utf-8"))}
    for name in made:
        kept = (ROOT / "docs/schedules" / name).read_text("utf-8")
        assert (tmp_path / name).read_text("utf-8") == kept, "run docs/schedules/draw.py"
