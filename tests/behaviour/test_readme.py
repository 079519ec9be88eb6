"""The code of the README and of the guide runs, block after block."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from torchgpipe._torch.dynamo import VERSION
from torchgpipe.planner.blocks import timed
from torchgpipe.planner.problem import problem_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.rst"
#: tests/virtual runs the pages about virtual accelerators, tests/schedule the page that prints, and
#: test_tutorial.py the tutorial.
GUIDE = {*(ROOT / "docs").glob("*.rst")} - {*(ROOT / "docs").glob("tutorial*.rst")}
ELSEWHERE = {ROOT / f"docs/{name}.rst" for name in ("dry_run", "schedule", "testing")}
GUIDE = sorted(GUIDE - ELSEWHERE)
#: Pages that need a newer PyTorch than the package.
NEWER = {"across_machines": (2, 13)}


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Forget what other pages have compiled, which messages speak of."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def no_accelerators(monkeypatch):
    """Hide all accelerators, which may be fewer than the partitions of the examples.

    A plan is for two CPUs then, since there is nothing to plan for one device.
    """
    monkeypatch.setattr("torchgpipe.partition.arguments.accelerators", list)
    monkeypatch.setattr("torchgpipe.planner.given.accelerators", lambda: [torch.device("cpu")] * 2)


def test_readme(run):
    text = README.read_text("utf-8")
    # What one reads in two minutes.
    assert len(text.splitlines()) <= 60
    assert 'GPipe(nn.Sequential(a, b, c, d), "auto", sample=sample, chunks=8)' in text
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    before = [x.clone() for x in layers.parameters()]
    run(
        README,
        layers=layers,
        sample=torch.rand(16, 4),
        loader=[(torch.rand(16, 4), torch.randint(4, (16,)))] * 2,
        **dict(zip("abcd", layers)),
    )
    assert not any(x.equal(y) for x, y in zip(layers.parameters(), before))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Measure models twice, and not for a second."""
    monkeypatch.setattr("torchgpipe.planner.maps.timed", partial(timed, timeout=0))
    monkeypatch.setattr("torchgpipe.planner.auto.problem_of", partial(problem_of, timeout=0))


@pytest.mark.parametrize(
    "file", [x for x in GUIDE if "code-block" in x.read_text("utf-8")], ids=lambda file: file.stem
)
# PyTorch's compiler reads the gradient of every input, also of one that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_guide(run, file, tmp_path, monkeypatch):
    if NEWER.get(file.stem, (0,)) > VERSION:
        pytest.skip(f"PyTorch {VERSION} has no runtime for it")
    monkeypatch.chdir(tmp_path)
    run(file)


@pytest.mark.parametrize(
    "file", [README, *sorted((ROOT / "docs").glob("*.rst"))], ids=lambda x: x.stem
)
def test_links(file):
    links = re.findall(r"<([^<>\s:]+\.(?:rst|md|py))>`_", file.read_text("utf-8"))
    assert [link for link in links if not (file.parent / link).exists()] == []
