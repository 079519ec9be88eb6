"""No generator is suspended within a block that changes something."""

import ast

import pytest

from tests.support.sources import FILES, PACKAGE, nodes, tree

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
INNER = FUNCTIONS | ast.Lambda | ast.ClassDef
#: The functions with these decorators are resumed by a block of their callers'.
RESUMED = {"contextmanager", "asynccontextmanager"}


def suspended(tree):
    """Find the lines of a syntax tree at which a generator is suspended within a block.

    If nobody goes on with the generator, as after an error, the garbage collector closes it, in
    any thread. It leaves the block there and then, or never: what the block has set stays set.
    """
    return sorted(
        {
            node.lineno
            for function in nodes(tree)
            if isinstance(function, FUNCTIONS) and not is_resumed(function)
            for block in own(function)
            if isinstance(block, ast.With | ast.AsyncWith)
            or (isinstance(block, ast.Try) and block.finalbody)
            for node in own(block)
            if isinstance(node, ast.Yield | ast.YieldFrom)
        }
    )


def is_resumed(function):
    names = [ast.unparse(x).partition("(")[0].rpartition(".")[2] for x in function.decorator_list]
    return not RESUMED.isdisjoint(names)


def own(node):
    """Yield the nodes below a node, without those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, INNER):
            yield child
            yield from own(child)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f():\n with a:\n  x = 1\n yield x", []),
        ("def f():\n with a:\n  x = yield", [3]),
        ("def f():\n if b:\n  with a, c:\n   for x in y:\n    g((yield from x))", [5]),
        ("async def f():\n async with a:\n  yield 1", [3]),
        ("def f():\n try:\n  yield 1\n finally:\n  g()", [3]),
        ("def f():\n try:\n  yield 1\n except E:\n  g()", []),
        ("def f():\n with a:\n  def g():\n   yield 1", []),
        ("def f():\n def g():\n  with a:\n   yield 1", [4]),
        ("class A:\n def f(self):\n  with a:\n   yield 1", [4]),
        ("@contextmanager\ndef f():\n with a:\n  yield 1", []),
        ("@contextlib.contextmanager\ndef f():\n with a:\n  yield 1", []),
        ("@pytest.fixture(scope='module')\ndef f():\n with a:\n  yield 1", [4]),
    ],
)
def test_what_is_found(source, lines):
    assert suspended(ast.parse(source)) == lines


def test_no_generator_is_suspended_within_a_block():
    found = {str(file.relative_to(PACKAGE)): suspended(tree(file)) for file in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}
