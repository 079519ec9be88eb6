"""Under GPipe each model computes what it computes alone, wherever it is cut."""

import ast
import copy
from pathlib import Path

import pytest
import torch

from benchmarks import models
from benchmarks.models import gpt, unet
from tests.benchmarks.models import NAMES, children, make
from tests.support.helpers import plain
from tests.support.size import soak
from torchgpipe import GPipe
from torchgpipe.skip import verify_skippables
from torchgpipe.skip.tracker import skips

#: Balances of n layers, by name.
BALANCES = {
    "one": lambda n: [n],
    "two": lambda n: [n // 2, n - n // 2],
    "uneven": lambda n: [1, n // 3, n - n // 3 - 3, 2],
    "every": lambda n: [1] * n,
}


def wrap(model, balance, **options):
    return GPipe(copy.deepcopy(model), balance, devices=["cpu"] * len(balance), **options)


def compare(model, wrapped, output, expected):
    """Compare outputs, gradients and buffers."""
    torch.testing.assert_close(output, expected)
    output.square().mean().backward()
    expected.square().mean().backward()
    for (name, mine), theirs in zip(wrapped.module.named_parameters(), model.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    torch.testing.assert_close(wrapped.module.state_dict(), model.state_dict())


CASES = [("one", "always"), ("two", "never"), ("uneven", "except_last"), ("every", "always")]


@pytest.mark.parametrize(
    ("name", "balance", "mode"),
    [
        # AmoebaNet-D has the most layers by far.
        pytest.param(name, *case, marks=[soak] * (name == "amoebanetd" and case[0] != "uneven"))
        for name in NAMES
        for case in CASES
    ],
)
def test_parity(name, balance, mode):
    model, input = make(name)
    verify_skippables(model)
    wrapped = wrap(model, BALANCES[balance](len(model)), chunks=2, checkpoint=mode)
    compare(model, wrapped, wrapped(input), plain(model, input, 2))


@pytest.mark.parametrize("name", NAMES)
def test_eval(name):
    model, input = make(name)
    wrapped = wrap(model, BALANCES["two"](len(model)), chunks=3)
    model.eval(), wrapped.eval()
    compare(model, wrapped, wrapped(input), model(input))


@pytest.mark.parametrize("name", ["unet", "gpt"])
def test_dropout(name):
    _, input = make(name)
    few = {
        "unet": lambda: unet(2, num_convs=2, base_channels=4, dropout=0.5),
        "gpt": lambda: gpt(11, 8, layers=2, width=8, heads=2, dropout=0.5),
    }
    model = few[name]().double()
    wrapped = wrap(model, BALANCES["two"](len(model)), chunks=1, checkpoint="always")
    torch.manual_seed(1)
    output = wrapped(input)
    torch.manual_seed(1)
    compare(model, wrapped, output, model(input))
    assert not torch.equal(model(input), model(input))


@pytest.mark.parametrize("name", ["amoebanetd", "unet", "resnet"])
def test_skips_cross_every_cut_between_their_ends(name):
    model, _ = make(name)
    crossing, found = set(), []
    for layer in model:
        stashed, popped = skips(layer)
        crossing = crossing - set(popped) | set(stashed)
        found.append(len(crossing))
    assert max(found) == (1 if name == "resnet" else 2)
    assert found[-1] == 0


def test_layers_are_flat():
    for name in NAMES:
        model, _ = make(name)
        assert all("." not in child for child in children(model))
        assert len(model) > (6 if name == "gpt" else 40)


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
