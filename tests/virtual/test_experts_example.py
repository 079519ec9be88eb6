"""The example of a mixture of experts hides exchanges where cells are side by side."""

import pytest
import torch

from examples import mixture_of_experts


@pytest.fixture(autouse=True)
def loaded(devices, monkeypatch):
    monkeypatch.setattr(mixture_of_experts, "load", lambda count: devices[:count])
    # The whole example takes half a minute.
    monkeypatch.setattr(mixture_of_experts, "WORKERS", 1)


def test_main(capsys):
    assert mixture_of_experts.main(["--chunks", "4"]) == 0
    head, *rows, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["schedule", "ms", "exchanges"]
    assert last == "All gradients are equal"
    names = [row[:16].strip() for row in rows]
    assert names == ["1f1b", "zero_bubble_v", "dualpipe_v", "1f1b of pairs"]
    assert all(float(row[16:24]) > float(row[24:]) > 0 for row in rows)


def test_where_they_differ(monkeypatch, capsys):
    grads = iter(torch.arange(4.0))
    monkeypatch.setattr(mixture_of_experts, "step", lambda *_: (1.0, 1.0, next(grads)))
    assert mixture_of_experts.main(["--chunks", "2"]) == 1
    assert "Not as it should be" in capsys.readouterr().out
