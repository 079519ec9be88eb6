"""Docstrings begin with a verb in the imperative, or with a noun."""

import ast
import re
from pathlib import Path

import pytest

import torchgpipe
from tests.support import sources

ROOT = Path(torchgpipe.__file__).resolve().parent.parent
FILES = [
    file
    for folder in ("torchgpipe", "benchmarks", "examples", "tests", "tools")
    for file in (ROOT / folder).rglob("*.py")
]

#: Verbs in the third person, which would leave open who does it.
VERBS = """
    accepts adds applies asks asserts balances begins branches brings builds calls cannot carries
    checks chooses collects communicates compares compiles computes converts counts creates
    cuts declares defines describes does draws drops enters fails fills finds frees gathers
    generates gets gives goes hands has holds installs is joins keeps knows leaves lets lists loads
    logs looks makes maps marks measures merges moves normalises observes opens parses passes
    plays pops prepares presses prints profiles puts raises reads recomputes records registers
    releases removes renders replaces restores returns runs saves scatters seeds sees sends sets
    shows simulates splits stands starts stashes stays stops stores swaps takes tells trains
    triggers tries updates uses verifies waits walks watches wraps writes yields
"""

#: Words after which a noun is missing.
PRONOUNS = """
    also and as but he how if it its nor of she so that them there these they those what
    whatever where which who whoever whose yes
"""

DENIED = {*VERBS.split(), *PRONOUNS.split()}


def docstrings(module):
    """The docstrings of a module's tree: each with the line of what it describes."""
    blocks = [module]
    for node in blocks:
        # Statements in statements, without the expressions in them.
        blocks += [x for x in ast.iter_child_nodes(node) if hasattr(x, "body")]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def faults(module):
    """The docstrings that begin otherwise, and those with a sentence that lacks its noun."""
    for line, text in docstrings(module):
        first = re.match(r"\w*", text)[0].lower()
        if first in DENIED or re.search(r"(^|[.:;] )(Has|Those|That which)\b", text):
            yield f"{line}: {text.splitlines()[0]}"


def test_docstrings():
    found = {}
    for file in FILES:
        # Other tests read the package, too. Trees that stay take the collector's time.
        module = (
            sources.tree(file)
            if file in sources.FILES
            else ast.parse(file.read_text(encoding="utf-8"))
        )
        found[file] = [*faults(module)]
    assert {str(file): some for file, some in found.items() if some} == {}


@pytest.mark.parametrize(
    "text",
    [
        "Returns the sum.",
        "What is kept.",
        "Also in a soak.",
        "Those that wait.",
        "Has the layers draw.",
        "Run it. Has no effect on the CPU.",
    ],
)
def test_faults_are_found(text):
    module = ast.parse(f'def function():\n    """{text}"""\n')
    assert list(faults(module)) == [f"1: {text}"]
