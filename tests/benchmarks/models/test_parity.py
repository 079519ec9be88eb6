"""Under GPipe each model computes what it computes alone, wherever it is cut."""

import ast
import copy
from pathlib import Path

import pytest
import torch

from benchmarks import models
from tests.benchmarks.models import NAMES, make
from tests.support.helpers import plain
from torchgpipe import GPipe
from torchgpipe.skip import verify_skippables


@pytest.mark.parametrize("name", NAMES)
def test_parity(name):
    model, input = make(name)
    verify_skippables(model)
    n = len(model)
    balance = [1, n // 3, n - n // 3 - 3, 2]
    wrapped = GPipe(copy.deepcopy(model), balance, devices=["cpu"] * 4, chunks=2)
    output, expected = wrapped(input), plain(model, input, 2)
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for (key, mine), theirs in zip(wrapped.module.named_parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=key)
    torch.testing.assert_close(wrapped.module.state_dict(), model.state_dict())


def test_nothing_is_imported_that_the_other_library_does_not_have():
    found = set()
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith("torchgpipe") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module.startswith("torchgpipe"):
                assert node.module == "torchgpipe.skip"
                found |= {alias.name for alias in node.names}
    assert found == {"Namespace", "pop", "skippable", "stash"}
