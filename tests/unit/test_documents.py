"""Documents name files and objects that exist."""

import ast
import importlib
import pydoc
import re
import runpy
from functools import reduce
from pathlib import Path

import pytest

import torchgpipe
from tests.examples import MISSING
from tests.virtual.mutants import guards
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss, distributed, plans, schedule, testing

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("*.rst"))
BOOK = ("glossary", "architecture", "recipes", "debugging")
PAGES = [*DECISIONS, *[DOCS / f"{name}.rst" for name in BOOK]]
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


#: What pages call objects of these classes.
OBJECTS = {
    "timeline": [torchgpipe.Timeline],
    "seen": [testing.Observation],
    "predicted": [testing.Prediction],
    "report": [schedule.Report],
    "plans": [plans.Plans],
    "candidate": [plans.Candidate],
    "training": [torchgpipe.ScheduledLoss],
    "pipe": [torchgpipe.GPipe, torchgpipe.MappedGPipe, distributed.Pipe],
    "model": [torchgpipe.GPipe, torchgpipe.MappedGPipe, distributed.Pipe],
}
#: What models of others have.
OTHERS = {"generate", "layers", "lm_head"}


def known(name):
    """Whether the package has a dotted name, or the class of an object what follows its name."""
    first, *rest = name.split(".")
    if first != "torchgpipe":
        classes = [x for kind in OBJECTS[first] for x in kind.__mro__]
        own = {x for kind in classes for x in getattr(kind, "__annotations__", {})}
        return rest[0] in own | OTHERS or any(hasattr(kind, rest[0]) for kind in OBJECTS[first])
    for k in range(len(rest), -1, -1):
        try:
            module = importlib.import_module(".".join([first, *rest[:k]]))
            return reduce(getattr, rest[k:], module) is not None
        except (ImportError, AttributeError):
            continue
    return False


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.rst")), ids=lambda page: page.stem)
def test_names_exist(page):
    """Names of public objects in pages are those of the package, so that a rename finds them."""
    names = "|".join(["torchgpipe", *OBJECTS])
    found = {
        match[0]
        for x in literals(page)
        # What is gone is named where one comes from 0.0.7.
        if x != "torchgpipe.microbatch"
        for match in re.finditer(rf"(?<![\w./])(?:{names})\.[a-zA-Z_]\w*(?:\.\w+)*(?!/)", x)
    }
    assert [x for x in sorted(found) if not known(x)] == []


def test_moved_pages_lead_somewhere():
    tree = ast.parse((DOCS / "conf.py").read_text("utf-8"))
    (moved,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign | ast.Assign) and "MOVED" in ast.unparse(node)[:5]
    ]
    pages = {x.stem for x in DOCS.glob("*.rst")}
    assert not {*moved} & pages
    assert {place.partition(".html")[0] for place in moved.values()} <= pages


def test_what_decides_exists():
    text = (DOCS / "architecture.rst").read_text("utf-8").partition("Where is it decided?")[2]
    found = re.findall(r"``(torchgpipe/\S+\.py)``, ``([\w.]+)``", text)
    assert len(found) >= 40
    for path, name in found:
        node = ast.parse((ROOT / path).read_text("utf-8"))
        for part in name.split("."):
            inside = {getattr(x, "name", ""): x for x in node.body}
            assert part in inside, (path, name)
            node = inside[part]


def test_each_file_of_a_room_is_named():
    """The book names each file: by its path, or in italics, perhaps in the plural."""
    text = (DOCS / "architecture.rst").read_text("utf-8")
    italic = re.findall(r"(?<!\*)\*([^*`]+)\*(?!\*)", text)
    words = {" ".join(x.lower().replace("_", " ").split()) for x in italic}
    files = [x for x in (ROOT / "torchgpipe").glob("*/**/*.py") if not x.stem.startswith("__")]
    missing = [
        path
        for path in (str(x.relative_to(ROOT)) for x in files)
        if path not in text
        and not {(name := Path(path).stem.replace("_", " ")), name + "s", name[:-1]} & words
    ]
    assert missing == []


def test_the_changelog_begins_with_the_version():
    newest = headings(ROOT / "CHANGELOG.rst")[1]
    assert newest.partition(" ")[0] == torchgpipe.__version__


def test_the_glossary_has_few_words_of_our_own():
    text = (DOCS / "glossary.rst").read_text("utf-8")
    own = re.findall(r"^(\w.*)\n   ", text.partition("Our own words")[2], re.MULTILINE)
    expected = ["cell", "course", "fence", "guard", "lane", "lead", "part", "post", "slot", "tail"]
    assert own == expected


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


@pytest.mark.parametrize(
    "thing",
    [GPipe, MappedGPipe, ScheduledLoss, "pipelined"],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_help_fits_on_two_screens(thing):
    """The own part of a class stands first, before that of each nn.Module."""
    if thing == "pipelined":
        pytest.importorskip("transformers", exc_type=MISSING)
        thing = importlib.import_module("torchgpipe.transformers").pipelined
    text = pydoc.plain(pydoc.render_doc(thing))
    own, _, inherited = text.partition("Methods inherited from")
    assert bool(inherited) == isinstance(thing, type)
    assert len(own.splitlines()) <= 100
