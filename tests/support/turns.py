"""Tests that take turns: each runs in some commits, and whenever what it tests has changed."""

import subprocess
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).resolve().parent.parent.parent

#: Files of tests that take turns of three, by the beginning of their path, and what they test. They
#: are matrices of one room, and long; what other rooms may break in them is in tests/contract, too.
TURNS = {
    "tests/examples/": ("examples/",),
    "tests/benchmarks/": ("benchmarks/",),
    "tests/virtual/test_examples": ("examples/",),
    "tests/virtual/test_benchmarks": ("benchmarks/",),
    "tests/virtual/test_memory_benchmark": ("benchmarks/",),
    "tests/behaviour/test_tutorial": ("docs/",),
    "tests/virtual/test_docs": ("docs/",),
    "tests/behaviour/test_compiler": ("torchgpipe/engine/", "torchgpipe/recompute/"),
    "tests/virtual/test_parity": ("torchgpipe/engine/", "torchgpipe/autograd/"),
    "tests/virtual/test_limit": ("torchgpipe/engine/", "torchgpipe/devices/"),
    "tests/virtual/test_offload": (
        "torchgpipe/recompute/",
        "torchgpipe/schedule/",
        "torchgpipe/mapped",
    ),
    "tests/behaviour/test_schedules_compiled": ("torchgpipe/engine/", "torchgpipe/graphs/"),
    "tests/behaviour/test_graph_": ("torchgpipe/graphs/",),
    "tests/virtual/test_graph_": ("torchgpipe/graphs/",),
    "tests/unit/graphs/test_overlap": ("torchgpipe/graphs/",),
    "tests/unit/graphs/test_parts_compiled": ("torchgpipe/graphs/",),
    "tests/unit/graphs/test_slices_": ("torchgpipe/graphs/",),
    "tests/virtual/test_slices": ("torchgpipe/transformers/", "torchgpipe/mapped"),
    "tests/virtual/test_joined_steps": ("torchgpipe/transformers/",),
    "tests/virtual/test_trl": ("torchgpipe/transformers/", "torchgpipe/mapped"),
    "tests/virtual/test_spread_trainer": ("torchgpipe/transformers/", "torchgpipe/mapped"),
    "tests/unit/transformers/test_trainer": ("torchgpipe/transformers/",),
    "tests/virtual/test_mapped_memory": ("torchgpipe/planner/", "torchgpipe/mapped"),
    "tests/virtual/test_advice": ("torchgpipe/planner/", "torchgpipe/tracing.py"),
    "tests/virtual/test_plan": ("torchgpipe/planner/", "torchgpipe/plans.py"),
}


def takes_part(path):
    """Whether a file of tests runs in this commit."""
    name = path.relative_to(ROOT).as_posix()
    sources = next((x for begin, x in TURNS.items() if name.startswith(begin)), None)
    return sources is None or has_turn(name, (name, *sources), 3)


def has_turn(name, sources, count):
    """Whether something has a turn in this commit.

    It has one if what it tests differs from the parent commit, and else in one commit of some, by
    its hash. Without git, and in a clone without a parent, only the latter.

    Args:
        name: its name.
        sources: what it tests: files, by the beginnings of their paths.
        count: the number of commits of which one is its turn.
    """
    turn = int(_git("rev-parse", "HEAD")[:8] or "0", 16)
    changed = _git("diff", "--name-only", "HEAD~1").splitlines()
    return any(x.startswith(sources) for x in changed) or (crc32(name.encode()) + turn) % count == 0


@cache
def _git(*arguments):
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout
