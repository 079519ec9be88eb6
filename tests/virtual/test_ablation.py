"""Ablation: switching off a part of the method costs time or memory, and races nowhere."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.models.experiments import unet
from benchmarks.rivals.switches import PARTS, CopyForCompute, switched_off
from benchmarks.simulate.standins import StageCosts
from benchmarks.suites import ablation
from tests.support.helpers import assert_no_races
from tests.support.size import soak
from torchgpipe import testing
from torchgpipe.autograd.copy import Copy

pytestmark = pytest.mark.usefixtures("prompt")

#: Three stages of equal cost, and a skip past the second one.
STAGES = StageCosts([1.0] * 3, [2.0] * 3, [2, 2], [(0, 2, 4)], link=2.0)


@pytest.fixture
def measured(devices, monkeypatch):
    """Take steps of the stages with parts switched off."""

    def measured(*parts, mode="except_last"):
        return ablation.in_virtual_time(STAGES, parts, mode, devices, seeds=4)

    monkeypatch.setattr(ablation, "ABLATION", replace(ablation.ABLATION, n=3, m=6))
    return measured


def test_nothing_is_switched_off_afterwards(measured):
    limit = STAGES.limit("except_last", 6)
    assert measured()["ms"] == [limit] * 4
    measured(*PARTS)
    assert measured()["ms"] == [limit] * 4


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_missed(measured, part):
    found = measured(part)
    assert max(found["ms"]) > STAGES.limit("except_last", 6)


@pytest.mark.parametrize("parts", [(), ("lanes",)], ids=ablation.name)
def test_lanes_are_where_copies_belong_and_not_where_they_run(devices, monkeypatch, parts):
    function = CopyForCompute if parts else Copy
    backward = function.backward
    belong = []

    def seen(ctx, *grads):
        lane = ctx.next_stream
        belong.append((torch.accelerator.current_stream(lane.device), lane))
        return backward(ctx, *grads)

    monkeypatch.setattr(function, "backward", seen)
    computes = [torch.accelerator.current_stream(device) for device in devices[:2]]
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with switched_off(parts) as wrap:
        model = wrap(layers, [1, 1], devices=devices[:2], chunks=2)
        input = torch.rand(4, 3, device=devices[0])
        with testing.observe(bandwidth={(0, 1): 1.0, (1, 0): 1.0}) as observed:
            model(input).sum().backward()
    assert len(belong) == 2
    for stream, lane in belong:
        assert lane not in computes
        assert stream == (computes[1] if parts else lane)
    assert_no_races(observed)
    ran = {span.stream for span in observed.spans if span.stream.device == 1}
    assert {stream.number for stream in ran} == {lane.stream_id for _, lane in belong}


def test_each_step_has_a_seed(measured, monkeypatch):
    observe = testing.observe
    seeds = []

    def seen(**options):
        seeds.append(options["jitter"])
        return observe(**options)

    monkeypatch.setattr(testing, "observe", seen)
    assert len(measured()["ms"]) == 4
    assert seeds == [0, 1, 2, 3]


@pytest.mark.parametrize("parts", ablation.VARIANTS, ids=ablation.name)
def test_gradients_do_not_depend_on_the_parts(devices, parts):
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)])
    input = torch.rand(8, 3)
    layers(input).sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    with switched_off(parts) as wrap:
        model = wrap(layers, [1, 1, 1], devices=devices[:3], chunks=4)
        model(input.to(devices[0])).sum().backward()
    for parameter, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


@soak
def test_command(tmp_path, capsys, devices, monkeypatch):
    small = replace(ablation.ABLATION, model=unet(1, 16), size=64)
    monkeypatch.setattr(ablation, "ABLATION", small)
    path = tmp_path / "ablation.json"
    few = ["--modes", "never", "--steps", "1", "--output", str(path)]
    assert main(["ablation", *few, "--ours-alone"]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert [tuple(row["off"]) for row in result["rows"]] == list(ablation.VARIANTS)
    assert result["rows"][0]["ms"] == pytest.approx([result["limit_ms"]["never"]])
    assert result["experiment"] == asdict(ablation.ABLATION)
    assert "**Virtual time**" in capsys.readouterr().out
    assert path.with_suffix(".png").exists()


def test_figures():
    off = ("portals", "lanes")
    row = {"mode": "except_last", "off": off, "ms": [400.0, 500.0, 1000.0]}
    row |= {"busy": [0.5, 0.25, 0.75], "races": 0}
    nothing = {"mode": "always", "off": (), "ms": [250.0], "busy": [1.0], "races": 0}
    result = {"device": "virtual", "gpu": "Tesla P40", "experiment": {"batch": 128}}
    result |= {"limit_ms": {"except_last": 400.0, "always": 250.0}, "rows": [row, nothing]}
    (table,) = ablation.summarise(result).tables
    assert [dict(zip(table.head, cells)) for cells in table.rows] == [
        {
            "mode": "except_last",
            "without": "portals, lanes",
            "ms": "500 (1000)",
            "samples/s": "256.0",
            "time / limit": "1.250 (2.500)",
            "busy": "50.0%",
            "published": "55.2",
        },
        {
            "mode": "always",
            "without": "nothing",
            "ms": "250 (250)",
            "samples/s": "512.0",
            "time / limit": "1.000 (1.000)",
            "busy": "100.0%",
            "published": "-",
        },
    ]
    result |= {"device": "cuda", "limit_ms": {}}
    (table,) = ablation.summarise(result).tables
    assert [*table.head] == ["mode", "without", "ms", "samples/s", "published"]
    assert table.rows[0] == ["except_last", "portals, lanes", "500 (1000)", "256.0", "55.2"]
