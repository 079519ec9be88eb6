"""Layers of the package: who may import whom, and what is exported."""

import ast
import importlib
import re
import sys
from collections import Counter
from graphlib import CycleError, TopologicalSorter

import pytest

import torchgpipe
from tests.support import fresh, sources
from tests.support.sources import FILES, PACKAGE, nodes
from torchgpipe._torch.names import ATTRIBUTES, NAMES

MAP = (PACKAGE.parent / "CONTRIBUTING.rst").read_text("utf-8")
ROWS = re.findall(r"^(\d+) +(\w+) +([\d,]+) ", MAP, re.MULTILINE)
#: The map of ``CONTRIBUTING.rst``: each room with the number of its layer.
ROOMS = {room: int(layer) for layer, room, _ in ROWS}
#: By the same map, how many lines each room may have.
BUDGETS = {room: int(lines.replace(",", "")) for _, room, lines in ROWS}
BUDGETS |= {
    room: int(lines.replace(",", ""))
    for room, lines in re.findall(r"``(\w+)`` \(at most ([\d,]+) lines\)", MAP)
}
#: The module that users import has no name of its own within the package.
ROOMS[""], BUDGETS[""] = ROOMS.pop("torchgpipe"), BUDGETS.pop("torchgpipe")

#: Rooms that stand apart: what each of them imports besides itself.
APART = {"testing": {"_torch", "checks", "show", "ambient"}}

#: Modules that do without torch.
PLAIN = {"balance.blockpartition", "planner.cuts", "checks", "schedule"}
PLAIN |= {"show", *(f"show.{x.stem}" for x in (PACKAGE / "show").glob("[!_]*.py"))}
# A table of a wrapped model asks its modules.
PLAIN -= {"show.describe"}
PLAIN |= {f"schedule.{path.stem}" for path in (PACKAGE / "schedule").glob("[!_]*.py")}

EXTRAS = {"numpy", "tqdm", "sklearn", "safetensors"}
#: A requirement of PyTorch itself.
EXTRAS |= {"networkx"}
EXTRAS |= {"accelerate", "lightning", "peft", "timm", "transformers"}


def name_of(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(node):
    """Names of modules imported anywhere below a syntax node."""
    for child in nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield child.module
            if child.module == "torchgpipe" or child.module.startswith("torchgpipe."):
                yield from (f"{child.module}.{alias.name}" for alias in child.names)


TREES = {name_of(file): sources.tree(file) for file in FILES}


def defined(tree):
    """Private names that a module defines: functions, classes, variables and attributes."""
    for node in nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = getattr(node.value, "id", "")
            yield from [node.attr] if owner in ("self", "batch", "cls") else []


def ours(name):
    """The modules of this package that a module imports."""
    found = {
        x.removeprefix("torchgpipe.") for x in imports(TREES[name]) if x.startswith("torchgpipe.")
    }
    return found & set(TREES)


def room(name):
    return name.split(".")[0]


def test_files_are_short():
    """A file of 450 lines or more holds several notions."""
    folders = ("torchgpipe", "benchmarks", "examples", "tests", "tools")
    files = [x for folder in folders for x in (PACKAGE.parent / folder).rglob("*.py")]
    lengths = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {file: lines for file, lines in lengths.items() if lines >= 450} == {}


def test_rooms_keep_their_budgets():
    """A room that shrinks lowers its budget, so that nobody takes the room that it has won."""
    lines = Counter()
    for file in FILES:
        lines[room(name_of(file))] += len(file.read_text("utf-8").splitlines())
    assert {x: n for x, n in lines.items() if not n <= BUDGETS[x] < n + 50} == {}


def test_every_room_has_a_layer():
    assert {room(name) for name in TREES} == {*ROOMS, *APART}


def allowed(name):
    """The rooms that a module may import."""
    if room(name) in APART:
        return APART[room(name)] | {room(name)}
    return {x for x in ROOMS if ROOMS[x] < ROOMS[room(name)]} | {room(name)}


def test_nothing_imports_what_is_above_it():
    found = {name: {room(x) for x in ours(name)} - allowed(name) for name in TREES}
    assert {name: above for name, above in found.items() if above} == {}


def files_of(tree):
    """The files of this package that a syntax tree imports, wherever it does."""
    for node in nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torchgpipe"):
            module = node.module.removeprefix("torchgpipe").removeprefix(".")
            paths = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (path if path in TREES else module for path in paths)


def circle(files):
    """The files of a circle, each of which imports the one before; none if there is no circle."""
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_files_import_each_other_in_a_circle():
    """Imports for types alone count, too: a reader of a file need not know those above it."""
    assert circle({name: {*files_of(tree)} for name, tree in TREES.items()}) == []


def test_circles_are_seen():
    files = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert {*circle(files)} == {*"abc"}
    program = "if TYPE_CHECKING:\n    from torchgpipe.mapped.course import Course"
    assert [*files_of(ast.parse(program))] == ["mapped.course"]
    assert [*files_of(ast.parse("from torchgpipe.testing import loading, load"))] == [
        "testing.loading",
        "testing",
    ]


def test_no_import_within_a_function_hides_a_circle():
    found = {
        (name, node.name)
        for name, tree in TREES.items()
        for node in nodes(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and any(x.startswith("torchgpipe") for x in imports(node))
    }
    assert found == set()


def test_plain():
    for name in PLAIN:
        roots = {x.split(".")[0] for x in imports(TREES[name]) if not x.startswith("torchgpipe.")}
        assert roots <= {"__future__"} | set(sys.stdlib_module_names), name
        assert ours(name) <= PLAIN, name


def test_torch_is_the_only_dependency():
    allowed = {"torch", "torchgpipe"} | set(sys.stdlib_module_names)
    for name, node in [(name, node) for name, tree in TREES.items() for node in tree.body]:
        roots = {x.split(".")[0] for x in imports(node)}
        # Extras are imported where they are used. A room that is for one, and that nothing else
        # imports, says first of all what to install.
        where_used = isinstance(node, ast.FunctionDef) or room(name) == "transformers"
        assert roots <= allowed | (EXTRAS if where_used else set()), name


def test_only_devices_name_the_accelerator():
    found = {
        (name, node.attr)
        for name, tree in TREES.items()
        if room(name) not in ("_torch", "devices", "testing")
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
        and node.attr in ("accelerator", "Stream", "Event", "cuda", "xpu")
    }
    assert found == set()


def test_only_one_room_needs_other_processes():
    """Nothing but the room for several processes imports torch.distributed, or that room."""
    found = {
        name
        for name, tree in TREES.items()
        if room(name) != "distributed" and name != "_torch.pipelining"
        if any(x.startswith("torch.distributed") for x in imports(tree))
    }
    assert found == set()


def test_nothing_optional_is_imported_by_default():
    """PyTorch's compiler is not imported by a training either."""
    program = f"""
import sys, torch
from torch import nn
before = set(sys.modules)
import torchgpipe
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(sorted(new & {EXTRAS}))
rooms = ("testing", "distributed", "transformers")
print(*(f"torchgpipe.{{room}}" in sys.modules for room in rooms))
layers = nn.Sequential(nn.Linear(1, 1))
model = torchgpipe.GPipe(layers, [1], devices=["cpu"], checkpoint="always")
model(torch.ones(1, 1)).backward()
print("torch._dynamo" in before, "torch._dynamo" in sys.modules)
"""
    assert fresh.run_new(program) == (0, "[]\nFalse False False\nFalse False\n", "")


def test_exports():
    assert sorted(torchgpipe.__all__) == [
        "Chunk",
        "Chunks",
        "GPipe",
        "MappedGPipe",
        "NoChunk",
        "Offload",
        "OncePerMiniBatch",
        "PerMicroBatch",
        "ScheduledLoss",
        "Timeline",
        "__version__",
        "arguments",
        "is_checkpointing",
        "is_recomputing",
        "keep",
        "plan",
        "trace",
        "verify_recomputation",
    ]
    homes = [name for names in torchgpipe._HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == sorted(torchgpipe.__all__)
    assert all(hasattr(torchgpipe, name) for name in [*homes, *torchgpipe._MODULES])
    with pytest.raises(AttributeError, match="no attribute 'Pipe'"):
        torchgpipe.__getattr__("Pipe")


def test_a_schedule_needs_no_torch():
    program = """
import sys
import torchgpipe.schedule
print(torchgpipe.schedule.named("1f1b", 2, 4).placement, "torch" in sys.modules)
"""
    assert fresh.run_new(program) == (0, "(0, 1) False\n", "")


def test_all_names_exist():
    for name in TREES:
        module = importlib.import_module(f"torchgpipe.{name}".rstrip("."))
        assert isinstance(module.__all__, list), name
        assert all(hasattr(module, export) for export in module.__all__), name


def test_names_that_other_code_reaches_for():
    """Public projects that use torchgpipe 0.0.7 import these."""
    names = """
        balance.balance_by_size balance.balance_by_time balance.blockpartition.solve
        balance.profile.detach balance.profile.layerwise_sandbox
        batchnorm.DeferredBatchNorm gpipe.verify_module
        skip.Namespace skip.pop skip.skippable skip.stash skip.verify_skippables
    """
    for name in names.split():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"torchgpipe.{module}"), attribute)


#: Private attributes of other libraries' objects.
OTHERS = {"_replace", "_getframe", "_asdict", "_hf_hook", "_no_split_modules", "_pp_plan"}
OTHERS |= {"_attn_implementation"}

#: Private attributes and names of this package that other files of it use.
OURS = {x for name, tree in TREES.items() if room(name) != "_torch" for x in defined(tree)}

KNOWN = {*OURS, *OTHERS, *ATTRIBUTES}


def private(tree):
    """Private names of PyTorch that a module mentions in any way."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            paths = [node.attr] if node.attr not in KNOWN else []
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOK_UPS:
            paths = [x.value for x in node.args if isinstance(x, ast.Constant)]
            paths = [path for path in paths if path not in OTHERS | {*ATTRIBUTES}]
        else:
            continue
        for path in paths:
            parts = str(path).split(".")
            if parts[0] not in ("torchgpipe", "__future__") and any(map(is_private, parts)):
                yield path


#: Functions that look a name up.
LOOK_UPS = {"getattr", "hasattr", "setattr", "import_module", "__import__"}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_pytorch_are_in_their_room():
    found = {name: [*private(tree)] for name, tree in TREES.items() if room(name) != "_torch"}
    assert {name: paths for name, paths in found.items() if paths} == {}


@pytest.mark.parametrize(
    "program",
    [
        "torch._C.anything()",
        "from torch import _C",
        "import torch._dynamo",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "getattr(torch, '_C')",
        "import_module('torch._dynamo')",
        "tensor._view_func",
    ],
)
def test_private_names_are_seen(program):
    assert list(private(ast.parse(program)))


def test_every_private_name_is_used():
    used = {
        node.attr
        for tree in TREES.values()
        for node in nodes(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "_torch"
    }
    assert set(NAMES) == used - {"names"}
    attributes = {
        word for tree in TREES.values() for node in nodes(tree) for word in names_in(node)
    }
    assert set(ATTRIBUTES) <= attributes


def names_in(node):
    """Names that a syntax node defines, or asks an object for."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


#: Stems of files that stand in several rooms, with the one thing that each means in all of them.
STEMS = {
    "body": "the layers of a cell, which run once, or twice under checkpointing",
    "cell": "a micro-batch in a stage, as each driver runs it",
    "step": "what the cells of one step have in common, for stages and for maps",
}


def test_a_stem_stands_for_one_thing():
    stems = Counter(file.stem for file in FILES if not file.stem.startswith("__"))
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert {x for x, n in stems.items() if n > 1 or x in rooms} == STEMS.keys()


#: Names of several classes, with the reason.
CLASSES = {
    "Cell": "one for each driver",
    "Part": "of a graph, and of a report, which is public",
    "Candidate": "of schedules, and of plans: both are public",
    "Wait": "of a timeline, which is public, and of the trio leave, copy, wait",
}


def test_a_class_has_its_name_alone():
    """Names of types count, too: the aliases at the top of a module, without type variables."""
    names = Counter(
        x.name for tree in TREES.values() for x in nodes(tree) if isinstance(x, ast.ClassDef)
    )
    names.update(x for tree in TREES.values() for x in aliases(tree))
    assert {x for x, n in names.items() if n > 1} == CLASSES.keys()


def aliases(tree):
    """The names of types that a module gives to other types."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = getattr(target, "id", "")
            is_alias = isinstance(node, ast.Assign) or ast.unparse(node.annotation) == "TypeAlias"
            is_variable = ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec("))
            if name[:1].isupper() and not name.isupper() and is_alias and not is_variable:
                yield name


def test_words_of_pytorch():
    """Readers of PyTorch know other words for these: recomputation, in the same way."""
    ours = re.compile(r"\b([Ss]econd runs?|[Ll]ikewise)\b")
    found = [f"{file}: {word}" for file in FILES for word in ours.findall(file.read_text("utf-8"))]
    assert found == []
