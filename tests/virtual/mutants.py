"""The package with one change in its source, which the tests should notice."""

import re
import sys
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

import pytest

import torchgpipe
from tests.support.size import soak
from tests.support.turns import ROOT, has_turn
from torchgpipe.ambient.generators import _locks

PACKAGE = Path(torchgpipe.__file__).resolve().parent

#: Stands for a change that leaves the line out.
DROP = None


@cache
def guards():
    """Find the file of each guard, by the name in its marker."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in re.findall("# guard: (.+)", file.read_text(encoding="utf-8")):
            assert found.setdefault(name, file) == file, f"{name!r} stands in two files"
    return found


def by_turns(cases):
    """Mark mutants that have no turn in this commit, which is one of five; a soak runs all.

    Args:
        cases: the arguments of each test, of which the first one is the name of the guard.
    """

    def is_on(name):
        return has_turn(name, (guards()[name].relative_to(ROOT).as_posix(),), 5)

    return [pytest.param(*case, marks=() if is_on(case[0]) else soak) for case in cases]


def changed(source, name, change):
    """Change each line of a source below a marker of that name."""
    lines = source.split("\n")
    for k in [k for k, line in enumerate(lines) if line.strip() == f"# guard: {name}"]:
        # One line may have several markers.
        while lines[k].lstrip().startswith("# guard: "):
            k += 1
        line = lines[k]
        if change is DROP:
            lines[k] = " " * (len(line) - len(line.lstrip())) + "pass"
            continue
        old, new = change
        if old not in line:
            raise LookupError(f"the line of {name!r} has no {old!r}: {line.strip()}")
        lines[k] = line.replace(old, new)
    return "\n".join(lines)


def codes(code):
    """The code of each function in that of a module or class, by name and line."""
    found = {}
    for own in code.co_consts:
        if isinstance(own, CodeType):
            is_class = not own.co_flags & 2  # The flag of new local variables, as functions have.
            found |= codes(own) if is_class else {(own.co_name, own.co_firstlineno): own}
    return found


def functions(value, file, seen):
    """Yield the functions of a file that a module, a class or a decorated function refers to."""
    if id(value) in seen or getattr(value, "__module__", "").partition(".")[0] != "torchgpipe":
        return
    seen.add(id(value))
    if isinstance(value, FunctionType) and value.__code__.co_filename == file:
        yield value
    held = [*getattr(value, "__dict__", {}).values()]
    held += [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    held += [getattr(value, name, None) for name in ("__func__", "fget", "fset", "func")]
    for x in held:
        yield from functions(x, file, seen)


@contextmanager
def mutated(name, change):
    """Apply a change to the functions of the package within a ``with`` block.

    Objects and modules stay, so nothing is imported anew. Functions get other code.
    """
    file = guards()[name]
    source = file.read_text(encoding="utf-8")
    before, after = (
        codes(compile(text, str(file), "exec")) for text in (source, changed(source, name, change))
    )
    module = ".".join(("torchgpipe", *file.relative_to(PACKAGE).with_suffix("").parts))
    module = import_module(module.removesuffix(".__init__"))
    plain = []
    for key, function in _by_place(module, str(file)):
        if before[key] != after[key]:
            plain.append((function, function.__code__))
            function.__code__ = after[key]
    assert plain or change == ("", ""), f"no function changes without {name!r}"
    # Threads issue the cells, from the first step on.
    workers = sys.modules["torchgpipe.engine.workers"]
    has_streams, workers.has_streams = workers.has_streams, lambda device: False
    try:
        yield
    finally:
        workers.has_streams = has_streams
        for function, code in plain:
            function.__code__ = code
        # A mutant may have left a lock that nobody will release.
        _locks.clear()


def _by_place(module, file):
    for value in [*vars(module).values()]:
        for x in functions(value, file, set()):
            key = x.__code__.co_name, x.__code__.co_firstlineno
            yield key, x
