"""A LoRA network outside of a diffusion transformer, at tiny size."""

import pytest

from tests.examples import MISSING

pytest.importorskip("safetensors", exc_type=MISSING)

from examples import diffusion_lora as example


def test_example(capsys, monkeypatch):
    for name, value in {"BLOCKS": 2, "PARTITIONS": 2, "WIDTH": 8, "ROWS": 8}.items():
        monkeypatch.setattr(example, name, value)
    assert example.main(["--steps", "3", "--rank", "1", "--chunks", "2"]) == 0
    assert "the file within 0.0e+00" in capsys.readouterr().out
    load = example.load_file
    monkeypatch.setattr(
        example, "load_file", lambda file: {name: 2 * x for name, x in load(file).items()}
    )
    assert example.main(["--steps", "2", "--chunks", "2"]) == 1
