"""Each part of the method is switched off, is missed, and nothing races without it."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from benchmarks import ablation
from benchmarks.__main__ import main
from benchmarks.standins import Stages
from benchmarks.switches import SWITCHES, switched_off
from torchgpipe import GPipe

#: Three stages of equal cost, and a skip past the second one.
STAGES = Stages([1.0] * 3, [2.0] * 3, [2, 2], [(0, 2, 4)], link=2.0)


@pytest.fixture
def measured(devices, monkeypatch):
    """Takes steps of the stages with parts switched off."""

    def measured(*parts, mode="except_last"):
        with switched_off([part for part in parts if part != "portals"]):
            return ablation.in_virtual_time(STAGES, parts, mode, devices, seeds=4)

    monkeypatch.setattr(ablation, "ABLATION", replace(ablation.ABLATION, n=3, m=6))
    return measured


def test_nothing_is_switched_off_afterwards(measured):
    limit = STAGES.limit("except_last", 6)
    assert measured()["ms"] == [limit] * 4
    measured(*SWITCHES)
    assert measured()["ms"] == [limit] * 4


@pytest.mark.parametrize("part", [*SWITCHES, "portals"])
def test_each_part_is_missed(measured, part):
    found = measured(part)
    assert max(found["ms"]) > STAGES.limit("except_last", 6)
    assert found["races"] == 0


@pytest.mark.parametrize("parts", ablation.VARIANTS, ids=ablation.name)
def test_gradients_do_not_depend_on_the_parts(devices, parts):
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)])
    input = torch.rand(8, 3)
    layers(input).sum().backward()
    expected = [parameter.grad for parameter in layers.parameters()]
    layers.zero_grad()
    with switched_off([part for part in parts if part != "portals"]):
        model = GPipe(layers, [1, 1, 1], devices=devices[:3], chunks=4)
        model(input.to(devices[0])).sum().backward()
    for parameter, grad in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad.cpu(), grad)


def test_command(tmp_path, capsys, devices):
    path = tmp_path / "ablation.json"
    few = ["--modes", "never", "--steps", "2", "--output", str(path)]
    assert main(["ablation", *few]) == 0
    result = json.loads(path.read_text("utf-8"))
    assert [tuple(row["off"]) for row in result["rows"]] == list(ablation.VARIANTS)
    assert result["rows"][0]["ms"] == pytest.approx([result["limit_ms"]["never"]] * 2)
    assert result["experiment"] == asdict(ablation.ABLATION)
    assert "**Virtual time**" in capsys.readouterr().out
    assert path.with_suffix(".png").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    main(["ablation", "--device", "cuda"])
    assert capsys.readouterr().out == "not run: there is no CUDA GPU here\n"
