"""The code of docs/testing.rst runs, and shows what it says; other pages run over two devices."""

import re
from functools import partial
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from torch import nn

from tests.examples import MISSING
from tests.support.architectures import build
from tests.support.size import some
from torchgpipe import GPipe, trace
from torchgpipe.planner.blocks import timed
from torchgpipe.planner.problem import Problem
from torchgpipe.testing import Busy, observe

pytestmark = pytest.mark.usefixtures("one_round")

DOCS = Path(__file__).parent.parent.parent / "docs"
FILE = DOCS / "testing.rst"
TUTORIAL = sorted(DOCS.glob("tutorial*.rst"))
#: The timelines of a page.
SHOWN = {"tutorial": 3, "tutorial_transformers": 1, "tutorial_no_chain": 0}
TUTORIAL = some(TUTORIAL, [x for x in TUTORIAL if SHOWN[x.stem]])


def test_guide(run, devices, tmp_path, monkeypatch, capsys):
    # The devices of this process are loaded already.
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    monkeypatch.chdir(tmp_path)
    names = run(FILE)
    assert (tmp_path / "step.json").stat().st_size > 1000
    printed = capsys.readouterr().out.splitlines()
    text = FILE.read_text("utf-8")
    for line in printed[:3]:
        # The number of a stream is whichever comes next.
        assert line.split(" stream ")[0] in text
    assert any("waited from" in line for line in printed)
    # The dry run's report: its basis, and the time of its step.
    assert next(line for line in printed if line.startswith("predicted for")) in text
    assert next(line for line in printed if line.startswith("step of 515")) in text
    assert names["measured"] > names["predicted"].time


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
    monkeypatch.setattr("torchgpipe.planner.auto.Problem", partial(Problem, timeout=0))
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
    assert len(found) == SHOWN[file.stem]


def timelines(text):
    """The timelines in a text, with shares and advice; what else the devices hold is left out."""
    lines = "".join(f"{line.strip()}\n" for line in text.splitlines())
    found = re.findall(
        r"step of .+\n\n(?:.+\n)+\ndevice .+\n(?:virtual.+\n)+(?:\n.+: (?:try|take) .+\n)?", lines
    )
    held = r" +\d+\.\d$|virtual:\d has had .+ MiB in use"
    return [re.sub(held, "", x, flags=re.MULTILINE) for x in found]


@pytest.mark.parametrize("chunks", [8, 1])
def test_timelines_of_the_readme(devices, chunks):
    """A step that is cut into micro-batches, and one that is not."""
    layers = nn.Sequential(*[Busy(8 / chunks, 8 / chunks, 8 / chunks) for _ in range(4)])
    model = GPipe(layers, [1] * 4, devices=devices[:4], chunks=chunks, checkpoint="never")
    input = torch.rand(32, 1, device=devices[0], requires_grad=True)
    with observe(), trace(model) as timeline:
        model(input).sum().backward()
    text = (DOCS.parent / "README.rst").read_text("utf-8")
    drawn = [line.rstrip() for line in str(timeline).splitlines() if line.startswith("virtual")]
    assert "\n".join(f"   {line}" for line in drawn[:4]) in text
    time, busy = timeline.step().makespan, 100 * timeline.shares[0].busy
    assert f"({time:.0f} ms, busy {busy:.0f} %)" in text


def test_four_devices_of_the_quickstart(devices, monkeypatch, capsys):
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    text = (DOCS / "gpipe.rst").read_text("utf-8")
    exec(dedent(re.search(r"   # four\.py\n(?:   .*\n|\n)+", text)[0]), {})
    rows = re.findall(r"^virtual:\d  [.F].*", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 4


def test_plan_without_a_gpu(devices, monkeypatch, capsys):
    """The page's block for virtual accelerators runs after its first imports."""
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    text = (DOCS / "choose.rst").read_text("utf-8")
    first = re.search(r"code-block:: python\n\n((?:   .*\n|\n)+)", text)[1]
    names = {}
    exec(dedent(first).partition("plans =")[0], names)
    exec(
        dedent(re.search(r"   from torchgpipe.testing import load.*\n(?:   .*\n|\n)+", text)[0]),
        names,
    )
    shown = capsys.readouterr().out
    assert len(re.findall(r"^virtual:\d  [.F]", shown, re.MULTILINE)) == 4
    assert "planned" in shown


def test_debugging(run, devices, monkeypatch, capsys):
    monkeypatch.setattr("torchgpipe.testing.load", lambda number: devices[:number])
    page = DOCS / "debugging.rst"
    run(page)
    text = page.read_text("utf-8")
    printed = capsys.readouterr().out.splitlines()
    # The number of a stream is whichever comes next.
    assert [x for x in printed if x.rstrip().split(" stream ")[0] not in text] == []


def test_transformers_of_the_readme(devices, tmp_path, monkeypatch):
    """The lines train a model on four devices."""
    transformers = pytest.importorskip("transformers", exc_type=MISSING)
    text = (DOCS.parent / "README.rst").read_text("utf-8")
    block = dedent(re.search(r"code-block:: python\n\n((?:   .*\n|\n)+)", text)[1])
    torch.manual_seed(0)
    build("llama")[0].save_pretrained(tmp_path)
    (tmp_path / "README.rst").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    words = {"input_ids": [k % 20 for k in range(1000)]}
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: lambda _: words)
    quiet = 'trained", save_strategy="no", report_to=[], disable_tqdm=True'
    block = block.replace("Qwen/Qwen3-0.6B", tmp_path.as_posix()).replace('trained"', quiet, 1)
    names = {}
    block = block.replace("max_steps=10", "max_steps=1").replace("chunks=8", "devices=4, chunks=8")
    exec(block, names)
    assert {x.device for x in names["model"].parameters()} == {*devices[:4]}
