"""The code of the README and of the guide runs, block after block."""

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import build
from torchgpipe._torch.dynamo import VERSION
from torchgpipe.planner.blocks import timed
from torchgpipe.planner.problem import Problem

ROOT = Path(__file__).parents[2]
README = ROOT / "README.rst"
#: tests/virtual runs the pages about virtual accelerators, tests/schedule the page that prints, and
#: test_tutorial.py the tutorial.
GUIDE = {*(ROOT / "docs").glob("*.rst")} - {*(ROOT / "docs").glob("tutorial*.rst")}
ELSEWHERE = {ROOT / f"docs/{name}.rst" for name in ("debugging", "schedule", "testing")}
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


@pytest.mark.filterwarnings("ignore:a model is on the CPU alone")
def test_readme(run, tmp_path, monkeypatch):
    """Both blocks run as they are pasted; a tiny model stands for that of the hub."""
    transformers = pytest.importorskip("transformers", exc_type=MISSING)
    text = README.read_text("utf-8")
    # What one reads in two minutes.
    assert len(text.splitlines()) <= 60
    torch.manual_seed(0)
    build("llama")[0].save_pretrained(tmp_path)
    page = tmp_path / "README.rst"
    quiet = 'trained", save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True'
    text = text.replace("Qwen/Qwen3-0.6B", tmp_path.as_posix()).replace('trained"', quiet, 1)
    page.write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    words = {"input_ids": [k % 20 for k in range(1000)]}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: lambda _: words)
    names = run(page)
    assert len(names["data"]) == 15
    assert len(names["model"].devices) == 2


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Measure models twice, and not for a second."""
    monkeypatch.setattr("torchgpipe.planner.maps.timed", partial(timed, timeout=0))
    monkeypatch.setattr("torchgpipe.planner.auto.Problem", partial(Problem, timeout=0))


@pytest.mark.parametrize(
    "file", [x for x in GUIDE if "code-block" in x.read_text("utf-8")], ids=lambda file: file.stem
)
# PyTorch's compiler reads the gradient of every input, also of one that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
# A page of a Trainer, whose model is spread over all accelerators.
@pytest.mark.filterwarnings("ignore:a model is on the CPU alone")
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
