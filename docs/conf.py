"""Settings of the documentation site: ``make docs`` builds it into build/docs.

The pages link to each other as files, ``<see.rst>``, so that they can be read where they lie, too.
Here such links become links to the pages of the site, and links to other files of the repository
become links to where it is published.
"""

from __future__ import annotations

import posixpath
import re
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
#: The programs themselves, to which pages link.
html_extra_path = ["../examples"]
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
PAGES["CONTRIBUTING.rst"] = "contributing"
#: Where pages of before 0.1.0 went, for a release: who has their address is led on.
MOVED = {
    "balance": "choose.html#balance-alone",
    "batches": "inputs.html#micro-batches-that-you-have-made",
    "compile": "precision.html#torch-compile",
    "data_parallel": "across_machines.html#data-parallelism",
    "differences": "trouble.html#the-contract",
    "dry_run": "testing.html#a-dry-run",
    "evaluation": "training.html#evaluate",
    "examples": "index.html#examples",
    "messages": "trouble.html#what-messages-mean",
    "migration": "coming_from.html#torchgpipe-0-0-7-and-fairscale",
    "preference": "trainers.html#trl",
    "random": "batchnorm.html#random-numbers",
    "saving": "training.html#save-and-load",
    "schedules_run": "schedule.html#run-it",
    "sequential_models": "model.html#models-of-transformers",
    "skip": "tutorial_no_chain.html#skips",
    "speed": "see.html#make-it-faster",
    "threads": "how_it_works.html#who-issues-the-work",
    "tutorial_encoder_decoder": "tutorial_no_chain.html#an-encoder-and-a-decoder",
    "tutorial_unet": "tutorial_no_chain.html#a-u-net",
}


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
        if re.fullmatch(r"examples/\w+\.py", path):
            up = "../" * page.count("/")
            node["refuri"] = up + posixpath.basename(path)
            continue
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


def _moved(app: Any, error: Exception | None) -> None:
    """Write a page that leads on for each name that a page had before."""
    for name, place in MOVED.items() if error is None else ():
        lead = f'<meta http-equiv="refresh" content="0; url={place}">'
        text = f'<!DOCTYPE html>{lead}<a href="{place}">This page has moved.</a>\n'
        (Path(app.outdir) / f"{name}.html").write_text(text, encoding="utf-8")


def setup(app: Any) -> None:
    """Connect the change of links, and the pages that lead on."""
    app.connect("doctree-resolved", _linked)
    app.connect("build-finished", _moved)
