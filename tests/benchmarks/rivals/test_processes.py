"""Rivals are installed apart, and answer requests; a rival that fails is left out with a reason."""

import io
import json

import pytest
import torch

from benchmarks.rivals import library
from torchgpipe import GPipe

pytestmark = pytest.mark.usefixtures("prompt")


def answers(*requests):
    found = io.StringIO()
    devices = [torch.device("cpu")] * 2
    lines = io.StringIO("".join(json.dumps(x) + "\n" for x in requests))
    library.serve(library.Library(GPipe, devices), lines, found)
    return [json.loads(line) for line in found.getvalue().splitlines()]


def test_requests():
    setting = {"n": 2, "m": 2, "mode": "always", "kind": "training"}
    made, measured = answers(
        {"make": "benchmarks.rivals.cells:Cells", "arguments": setting},
        {"call": "measure", "arguments": {"seconds": 0}},
    )
    assert made == {"value": None}
    assert set(measured["value"]) == {"plain", "pipeline"}


def test_wrong_gradients_are_no_result():
    class Wrong(torch.nn.Module):
        def __init__(self, layers, balance, **options):
            super().__init__()
            self.layers = layers

        def forward(self, input):
            return self.layers(input.detach()) * 2 - self.layers(input).detach()

    cells = {"n": 1, "m": 2, "mode": "never", "kind": "training"}
    wrong = library.Library(Wrong, [torch.device("cpu")])
    found = io.StringIO()
    request = json.dumps({"make": "benchmarks.rivals.cells:Cells", "arguments": cells})
    library.serve(wrong, io.StringIO(request), found)
    assert "computes something else" in json.loads(found.getvalue())["error"]
