"""Documents name files and objects that exist."""

import re
import runpy
from pathlib import Path

import pytest

import torchgpipe
from tests.virtual.mutants import guards

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("*.rst"))
PAGES = [*DECISIONS, DOCS / "glossary.rst", DOCS / "architecture.rst"]
PAGES = [page for page in PAGES if page.exists()]

#: A path of a file, or of a folder with a slash at its end.
PATH = re.compile(r"[\w.-]+(/[\w.-]+)*/([\w-]*\.\w+)?")


def literals(page):
    """Literals in double backticks, each in one line."""
    found = re.findall("``(.+?)``", page.read_text("utf-8"), re.DOTALL)
    return [" ".join(x.split()) for x in found]


def headings(page):
    return re.findall(r"^(.+)\n[-=]{3,}$", page.read_text("utf-8"), re.MULTILINE)


def test_guards_exist():
    words = {x for page in PAGES for x in literals(page) if x.startswith("# guard: ")}
    assert {x.removeprefix("# guard: ") for x in words} <= set(guards())


def test_files_exist():
    named = [(page.stem, x) for page in PAGES for x in literals(page) if PATH.fullmatch(x)]
    assert [x for x in named if not (ROOT / x[1]).exists()] == []


def test_the_changelog_begins_with_the_version():
    newest = headings(ROOT / "CHANGELOG.rst")[1]
    assert newest.partition(" ")[0] == torchgpipe.__version__


def test_the_glossary_has_few_words_of_our_own():
    text = (DOCS / "glossary.rst").read_text("utf-8")
    own = re.findall(r"^(\w.*)\n   ", text.partition("Our own words")[2], re.MULTILINE)
    assert own == ["cell", "lane", "lead", "part", "slot"]


def test_pictures_are_drawn(tmp_path):
    runpy.run_path(str(DOCS / "draw.py"))["draw"](tmp_path)
    shown = re.findall(r"image:: (\S+)", "".join(x.read_text("utf-8") for x in DOCS.glob("*.rst")))
    assert {str(x.relative_to(tmp_path)) for x in tmp_path.glob("*/*")} == {*shown}


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_decisions_have_one_form(page):
    if page.stem == "index":
        linked = re.findall(r"<(.+)>`_", page.read_text("utf-8"))
        assert sorted(linked) == [x.name for x in DECISIONS if x != page]
        return
    _, *parts = headings(page)
    assert parts == ["Context", "Choice", "Tried", "Price", "Held by"]
    held = page.read_text("utf-8").split("Held by\n")[1]
    assert "``torchgpipe/" in held
    assert "``# guard: " in held
