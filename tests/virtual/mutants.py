"""Import of the package with one change in its source, which the tests should notice."""

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torchgpipe

PACKAGE = Path(torchgpipe.__file__).resolve().parent

#: The virtual accelerators are loaded once, and pytest knows its own modules.
KEPT = ("torchgpipe.testing", "tests.conftest", "tests.virtual.conftest", "tests.virtual.mutants")
# No guard is in here, and it imports nothing from elsewhere.
KEPT += ("torchgpipe.schedule.",)


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


class Mutant(importlib.abc.SourceLoader):
    """A loader of a module with a change in its source."""

    def __init__(self, path, name, change):
        self.path, self.name, self.change = path, name, change

    def get_filename(self, name):
        return self.path

    def get_data(self, path):
        with open(self.path, encoding="utf-8") as file:
            return changed(file.read(), self.name, self.change).encode()


@cache
def compiled(name, path):
    return importlib.machinery.SourceFileLoader(name, path).get_code(name)


class Again(importlib.machinery.SourceFileLoader):
    """A loader that reads the bytecode of a module once for all mutants."""

    def get_code(self, name):
        return compiled(name, self.path)


class Finder(importlib.abc.MetaPathFinder):
    """A finder of the changed module, and of all others that are imported anew."""

    def __init__(self, name, change):
        self.name, self.change = name, change
        self.file = str(guards()[name])

    def find_spec(self, name, path, target=None):
        if not _of_package(name):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if found.origin != self.file:
            found.loader = Again(name, found.origin)
            return found
        loader = Mutant(found.origin, self.name, self.change)
        return importlib.machinery.ModuleSpec(name, loader, origin=found.origin)


def _of_package(name):
    ours = name == "torchgpipe" or name.startswith(("torchgpipe.", "tests."))
    return ours and not name.startswith(KEPT)


def forget_kernels():
    """Have PyTorch forget the kernels of the package, of which it takes one copy's."""
    draws = sys.modules.get("torchgpipe._torch.draws")
    if draws is not None:
        for library in draws._libraries:
            library._destroy()
        draws._libraries.clear()
        draws.can_see.cache_clear()


@contextmanager
def mutated(name, change):
    """Apply a change to imports of the package and its tests within a ``with`` block."""
    before = {key: module for key, module in sys.modules.items() if _of_package(key)}
    forget_kernels()
    for key in before:
        del sys.modules[key]
    finder = Finder(name, change)
    sys.meta_path.insert(0, finder)
    try:
        # Threads issue the cells, from the first step on.
        importlib.import_module("torchgpipe.engine.workers").has_streams = lambda device: False
        yield
    finally:
        sys.meta_path.remove(finder)
        forget_kernels()
        for key in [key for key in sys.modules if _of_package(key)]:
            del sys.modules[key]
        sys.modules.update(before)
