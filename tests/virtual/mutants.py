"""The package with one change in its source, to see whether the tests would notice."""

import importlib
import importlib.abc
import importlib.machinery
import sys
from contextlib import contextmanager
from functools import cache

#: The virtual accelerators are loaded once, and pytest knows its own modules.
KEPT = ("torchgpipe.testing", "tests.conftest", "tests.virtual.conftest", "tests.virtual.mutants")


class Mutant(importlib.abc.SourceLoader):
    """Loads a module with a change in its source."""

    def __init__(self, path, old, new):
        self.path, self.old, self.new = path, old, new

    def get_filename(self, name):
        return self.path

    def get_data(self, path):
        with open(self.path, encoding="utf-8") as file:
            source = file.read()
        if self.old not in source:
            raise LookupError(f"{self.path} has no {self.old!r}")
        return source.replace(self.old, self.new).encode()


@cache
def compiled(path):
    with open(path, encoding="utf-8") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


class Again(importlib.machinery.SourceFileLoader):
    """Loads a module as often as there are mutants, and compiles it once."""

    def get_code(self, name):
        return compiled(self.path)


class Finder(importlib.abc.MetaPathFinder):
    """Finds the one loader for one module, and the other for all others that are imported anew."""

    def __init__(self, module, old, new):
        self.module, self.change = module, (old, new)

    def find_spec(self, name, path, target=None):
        if not _of_package(name):
            return None
        found = importlib.machinery.PathFinder.find_spec(name, path)
        if name != self.module:
            found.loader = Again(name, found.origin)
            return found
        loader = Mutant(found.origin, *self.change)
        return importlib.machinery.ModuleSpec(name, loader, origin=found.origin)


def _of_package(name):
    ours = name == "torchgpipe" or name.startswith(("torchgpipe.", "tests."))
    return ours and not name.startswith(KEPT)


@contextmanager
def mutated(module, old, new):
    """Within a ``with`` block, what is imported of the package and its tests has the change."""
    before = {name: value for name, value in sys.modules.items() if _of_package(name)}
    for name in before:
        del sys.modules[name]
    finder = Finder(f"torchgpipe.{module}", old, new)
    sys.meta_path.insert(0, finder)
    try:
        # Threads issue the cells, from the first step on.
        importlib.import_module("torchgpipe.engine.workers").has_streams = lambda device: False
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _of_package(name)]:
            del sys.modules[name]
        sys.modules.update(before)
