"""Settings of the documentation site: ``make docs`` builds it into build/docs.

The pages link to each other as files, ``<see.rst>``, so that they can be read where they lie, too.
Here such links become links to the pages of the site, and links to other files of the repository
become links to where it is published.
"""

from __future__ import annotations

import posixpath
import socket
import sys
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torchgpipe  # noqa: E402  # It is found by the line before.

project = "torchgpipe"
author = "the developers of torchgpipe"
release = version = torchgpipe.__version__
extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"),
    "myst_parser",
]
exclude_patterns = ["__pycache__"]
html_theme = "furo"
html_title = "torchgpipe"
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "inherited-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
#: Class attributes are described where the class is.
napoleon_use_ivar = True
#: The pages that have files of the repository in them.
PAGES = {
    "benchmarks/RESULTS.md": "benchmarks",
    "docs/reproduce.md": "reproduce",
    "docs/tables.md": "tables",
}
PAGES |= {f"examples/{x.name}": f"examples#{x.stem}" for x in (ROOT / "examples").glob("*.py")}


def _is_reachable(host: str) -> bool:
    """Whether there is a way to a host, without which names of others are plain text."""
    try:
        socket.create_connection((host, 443), timeout=3).close()
    except OSError:
        return False
    return True


OTHERS = {"python": "docs.python.org/3", "torch": "docs.pytorch.org/docs/stable"}
intersphinx_mapping = {
    name: (f"https://{place}", None)
    for name, place in OTHERS.items()
    if _is_reachable(place.partition("/")[0])
}


def _linked(app: Any, doctree: nodes.document, page: str) -> None:
    """Turn links to files into links to pages."""
    folder = posixpath.dirname(page)
    for node in doctree.findall(nodes.reference):
        target, _, anchor = node.get("refuri", "").partition("#")
        if "://" in target or posixpath.splitext(target)[1] not in (".rst", ".md", ".py"):
            # Sphinx has found the pages itself that its own links lead to.
            continue
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        own = path.removeprefix("docs/").removesuffix(".rst")
        name, _, place = PAGES.get(path, own).partition("#")
        if name not in app.env.found_docs:
            raise ValueError(
                "a page links to what is a page, or a part of one, of the site (page: "
                f"{page}, link: {target}); add it to PAGES in docs/conf.py"
            )
        anchor = anchor or place.replace("_", "-")
        if node.astext() == posixpath.basename(target):
            # In the tree a page is called by its file, and in the site by its title.
            node.children = [nodes.Text(app.env.titles[name].astext())]
        uri = app.builder.get_relative_uri(page, name)
        node["refuri"] = f"{uri}#{anchor}" if anchor else uri


def setup(app: Any) -> None:
    """Connect the change of links."""
    app.connect("doctree-resolved", _linked)
