"""The code of docs/testing.rst runs, and shows what it says; other pages run over two devices."""

import re
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import build
from tests.support.size import some
from torchgpipe.planner.blocks import timed
from torchgpipe.planner.problem import problem_of
from torchgpipe.testing import observe

pytestmark = pytest.mark.usefixtures("one_round")

DOCS = Path(__file__).parent.parent.parent / "docs"
FILE = DOCS / "testing.rst"
TUTORIAL = sorted(DOCS.glob("tutorial*.rst"))
# The first page has the timelines.
TUTORIAL = some(TUTORIAL, [x for x in TUTORIAL if x.stem == "tutorial"])


def test_guide(run, devices, tmp_path, monkeypatch, capsys):
    # The devices of this process are loaded already.
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    names = run(FILE, path=tmp_path / "trace.json")
    assert names["path"].stat().st_size > 1000
    printed = capsys.readouterr().out.splitlines()
    text = FILE.read_text("utf-8")
    for line in printed[:3]:
        # The number of a stream is whichever comes next.
        assert line.split(" stream ")[0] in text
    assert any("waited from" in line for line in printed)


def test_device_map_of_two_gpus(run, devices, tmp_path, monkeypatch):
    monkeypatch.setattr("torchgpipe.planner.maps.timed", partial(timed, timeout=0))
    text = (DOCS / "device_map.rst").read_text("utf-8")
    plain = '{"embed": "cpu", "blocks": "cpu", "head": "cpu"}'
    assert plain in text
    text = text.replace(plain, re.search(r"# With two GPUs: (\{.*\})", text)[1])
    page = tmp_path / "page.rst"
    page.write_text(text.replace('["cpu", "cpu"]', '["virtual:0", "virtual:1"]'), "utf-8")
    names = run(page)
    assert {x.device for x in names["model"].parameters()} == {*devices[:2]}


@pytest.mark.parametrize("file", TUTORIAL, ids=lambda file: file.stem)
# A tied weight is used in two partitions, each with a stream of its own.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_tutorial_of_two_gpus(file, run, devices, tmp_path, monkeypatch, capsys):
    """One line makes a page one for two accelerators, and its timelines are those shown."""
    monkeypatch.setattr("torchgpipe.planner.auto.problem_of", partial(problem_of, timeout=0))
    text = file.read_text("utf-8")
    gpus = re.search(r"# with two GPUs: (first, last = .*)", text)[1]
    assert text.count('first, last = "cpu", "cpu"') == 1
    page = tmp_path / "page.rst"
    text = text.replace('first, last = "cpu", "cpu"', gpus)
    page.write_text(text.replace('"cuda:', '"virtual:'), "utf-8")
    with observe(costs={"mm": 1.0, "addmm": 1.0, "convolution": 1.0}):
        names = run(page)
    assert {x.device for x in names["pipe"].parameters()} == {*devices[:2]}
    found = timelines(capsys.readouterr().out)
    assert found == timelines(text)
    assert len(found) == (3 if file.stem == "tutorial" else 0)


def timelines(text):
    """The timelines in a text, with shares and advice; what else the devices hold is left out."""
    lines = "".join(f"{line.strip()}\n" for line in text.splitlines())
    found = re.findall(
        r"step of .+\n\n(?:.+\n)+\ndevice .+\n(?:virtual.+\n)+(?:\n.+: (?:try|take) .+\n)?", lines
    )
    return [re.sub(r" +\d+\.\d$", "", x, flags=re.MULTILINE) for x in found]


def test_transformers_of_the_readme(devices, tmp_path):
    """The lines train a model on four devices."""
    transformers = pytest.importorskip("transformers", exc_type=MISSING)
    text = (DOCS.parent / "README.rst").read_text("utf-8")
    block = dedent(re.search(r"::\n\n((?:   .*\n|\n)+)", text)[1])
    assert len(block.splitlines()) <= 8
    torch.manual_seed(0)
    model, inputs = build("llama")
    model.save_pretrained(tmp_path)
    options = {"max_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    data = [dict(zip(inputs, row)) for row in zip(*inputs.values())]
    names = {
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
        "Trainer": transformers.Trainer,
        "name": tmp_path,
        "folder": str(tmp_path),
        "TrainingArguments": partial(transformers.TrainingArguments, **options),
        "data": data * 2,
    }
    exec(block, names)
    assert names["trainer"].state.global_step == 1
    assert {x.device for x in names["model"].parameters()} == {*devices[:4]}
