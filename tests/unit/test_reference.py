"""The reference has all names that are public, and no others; links of the site are checked."""

import importlib
import re
from pathlib import Path

import pytest

from tools.check_site import main

DOCS = Path(__file__).parents[2] / "docs"

#: Modules of which everything is public that they export.
PUBLIC = ("", "balance", "batchnorm", "distributed", "graphs", "schedule", "skip", "testing")
PUBLIC += ("transformers",)

#: Classes that public functions return, which nobody makes by hand.
RETURNED = {
    "torchgpipe.show.describe.Description",
    "torchgpipe.plans.Candidate",
    "torchgpipe.plans.Plans",
    "torchgpipe.show.timeline.Advice",
    "torchgpipe.show.shares.Shares",
}


def test_public_names():
    text = (DOCS / "reference.rst").read_text("utf-8")
    found = re.findall(r"^\.\. auto(?:class|function|exception):: (\S+)$", text, re.MULTILINE)
    names = {
        f"torchgpipe.{module}.{name}".replace("..", ".")
        for module in PUBLIC
        for name in importlib.import_module(f"torchgpipe.{module}".rstrip(".")).__all__
        if name != "__version__"
    }
    assert len(found) == len({*found})
    assert {*found} == names | RETURNED


def test_all_pages_are_in_the_site():
    index = (DOCS / "index.rst").read_text("utf-8")
    listed = set(re.findall(r"^   ([a-z_]+)$", index, re.MULTILINE))
    pages = {x.stem for x in DOCS.iterdir() if x.suffix in (".rst", ".md")} - {"index"}
    # Sphinx makes the index of all names.
    assert listed == pages | {"genindex"}
    # As many as one takes in at a glance.
    groups = [len(re.findall(r"^   [a-z_]+$", x, re.MULTILINE)) for x in index.split("toctree::")]
    assert max(groups) <= 7


def test_the_guide_has_28_pages_and_45_000_words():
    index = (DOCS / "index.rst").read_text("utf-8")
    guide = index.partition(":caption: Developers")[0].partition("toctree::")[2]
    pages = {*re.findall(r"^   ([a-z_]+)$", guide, re.MULTILINE)} - {"genindex"}
    assert len(pages) <= 27
    texts = [index, *((DOCS / f"{page}.rst").read_text("utf-8") for page in pages)]
    assert sum(len(text.split()) for text in texts) <= 45_000


def test_examples_are_in_the_site():
    text = (DOCS / "index.rst").read_text("utf-8")
    shown = set(re.findall(r"<\.\./examples/(\w+)\.py>`_", text))
    files = {x.stem for x in (DOCS.parent / "examples").glob("*.py")}
    assert shown == files - {"__init__", "options", "places"}


PAGES = {
    "good": ('<a href="other.html#place">a</a>', 0),
    "no page": ('<a href="none.html">a</a>', 1),
    "no place": ('<a href="other.html#none">a</a>', 1),
    "elsewhere": ('<a href="https://pytorch.org/none">a</a>', 0),
    "no picture": ('<img src="none.svg">', 1),
}


@pytest.mark.parametrize("name", PAGES)
def test_links_of_a_site(name, tmp_path, capsys):
    text, status = PAGES[name]
    (tmp_path / "index.html").write_text(text, "utf-8")
    (tmp_path / "other.html").write_text('<h1 id="place">Title</h1>', "utf-8")
    assert main([str(tmp_path)]) == status
    said = capsys.readouterr().out
    assert ("index.html: " in said) == bool(status)
