"""Layers of the benchmarks: who may import whom."""

import ast
import re
from importlib import import_module
from pathlib import Path

import benchmarks

ROOM = Path(benchmarks.__file__).parent

#: The rooms from the lowest to the highest. A room imports itself and what is below it.
LAYERS = [
    {"", "progress", "models"},
    {"report"},
    {"command", "alone"},
    {"rivals"},
    {"simulate"},
    {"suites"},
    {"render"},
    {"__main__"},
]


def name_of(file):
    parts = file.relative_to(ROOM).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(file): ast.parse(file.read_text("utf-8")) for file in ROOM.rglob("*.py")}


def imports(name):
    """The modules of the benchmarks that a module imports, anywhere in it."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found = [node.module, *[f"{node.module}.{alias.name}" for alias in node.names]]
        else:
            continue
        for x in found:
            if x.startswith("benchmarks.") and x.removeprefix("benchmarks.") in TREES:
                yield x.removeprefix("benchmarks.")


def room(name):
    return name.split(".")[0]


def test_nothing_imports_what_is_above_it():
    for name in TREES:
        height = next(k for k, layer in enumerate(LAYERS) if room(name) in layer)
        allowed = set().union(*LAYERS[:height], {room(name)})
        assert {room(x) for x in imports(name)} <= allowed, name


def test_there_is_no_circle():
    rest = {name: {*imports(name)} - {name} for name in TREES}
    while free := [name for name, needed in rest.items() if not needed & rest.keys()]:
        for name in free:
            del rest[name]
    assert not rest


def test_each_suite_measures_and_summarises():
    for file in (ROOM / "suites").glob("[!_]*.py"):
        suite = import_module(f"benchmarks.suites.{file.stem}")
        assert callable(suite.main)
        assert callable(suite.summarise)


def test_what_processes_are_told_to_make_exists():
    # These names are text, since rivals import them in processes of their own.
    found = {
        node.value
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"benchmarks[\w.]*:\w+", node.value)
    }
    assert found
    for text in found:
        module, _, name = text.partition(":")
        assert isinstance(getattr(import_module(module), name), type)
