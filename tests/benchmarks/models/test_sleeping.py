"""Layers that sleep sleep in forward, and twice as long in backward."""

import torch

from benchmarks.models.experiments import build


def test_sleeping(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)
    layers = build({"name": "sleeping", "layers": 3, "seconds": 0.5})
    output = layers(torch.full((2, 1), 4.0))
    assert slept == [0.5] * 3
    output.sum().backward()
    assert slept[3:] == [1.0] * 3
    assert output.tolist() == [[4.0]] * 2
    assert [x.grad.item() for x in layers.parameters()] == [8.0] * 3
