"""The package's sources as syntax trees, which several tests walk: parsed once."""

import ast
from functools import cache
from pathlib import Path

import torchgpipe

PACKAGE = Path(torchgpipe.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(file):
    """The syntax tree of a file, for reading only."""
    return ast.parse(file.read_text("utf-8"))


@cache
def nodes(tree):
    """All nodes of a tree, each before those below it."""
    return [*ast.walk(tree)]
