"""The exports of the package, its files, and the examples and pictures of its guide."""

import ast
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from torchgpipe import schedule

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs/schedule.rst"
FILES = sorted(Path(schedule.__file__).parent.glob("*.py"))


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_short_and_plain_python(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 450
    tree = ast.parse(text)
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert [node for node in tree.body if node in nodes] == nodes, "imports are at the top"
    modules = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    for module in modules:
        package = module.partition(".")[0]
        ours = module.startswith(("torchgpipe.schedule.", "torchgpipe.show.", "torchgpipe.checks"))
        assert ours or package in sys.stdlib_module_names


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
