"""Write the page of promises from their list: ``python -m tests.contract.page``."""

import sys
from pathlib import Path

from tests.contract.promises import GRAPHS, POLICY, PROMISES, SECTIONS, WRAPPERS

PAGE = Path(__file__).parent.parent.parent / "docs" / "promises.rst"

HEAD = """\
Where the wrappers differ
=========================

The wrappers keep {count} promises, each of which is one test, with every wrapper, kind of stages
and checkpoint mode, ``'offload'`` and a policy of PyTorch's included (``tests/contract``). Here are
the {few} in which one of them does something else; the others hold everywhere. A number leads to
the reason below the table, and the test checks that the difference is an error, or the one that is
named, and nothing that nobody notices. ``ScheduledLoss of graphs`` has ``stages="graph"``; where it
says eager, such stages are no graphs, and a warning says why. This page is made from the tests.
"""


def written():
    """The text of the page."""
    lines, few = [], 0
    for section in SECTIONS:
        found = [x for x in PROMISES.values() if x.name.startswith(f"{section}:")]
        differing = [x for x in found if x.otherwise or x.eager]
        if not differing:
            continue
        few += len(differing)
        title = sys.modules[f"tests.contract.{section}"].__doc__.splitlines()[0].rstrip(".")
        lines += [title, "-" * len(title), ""]
        reasons = []
        widths = "40 12 12 12 12 12"
        lines += [".. list-table::", "   :header-rows: 1", f"   :widths: {widths}", ""]
        lines += rows(["", *WRAPPERS])
        for promise in differing:
            cells = []
            for wrapper in WRAPPERS:
                other = promise.otherwise.get(wrapper)
                yes = "yes, eager" if promise.eager and wrapper == GRAPHS else "yes"
                no = "no"
                if other is None and wrapper != GRAPHS:
                    other, no = promise.otherwise.get(POLICY), "yes, but"
                if other and other.reason not in reasons:
                    reasons.append(other.reason)
                cells.append(f"{no} ({reasons.index(other.reason) + 1})" if other else yes)
            lines += rows([promise.sentence, *cells])
        lines += ["", *[f"{k}. {reason}" for k, reason in enumerate(reasons, 1)]]
        lines += [""] if reasons else []
    return "\n".join([HEAD.format(count=len(PROMISES), few=few), *lines]).rstrip("\n") + "\n"


def rows(cells):
    """A row of a table."""
    return [f"   {'*' if k == 0 else ' '} - {cell}".rstrip() for k, cell in enumerate(cells)]


if __name__ == "__main__":
    PAGE.write_text(written(), "utf-8")
