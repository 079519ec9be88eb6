"""The code of the README runs, block after block."""

import re
from pathlib import Path
from textwrap import dedent

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe

README = Path(__file__).parent.parent / "README.rst"


def test_code(tmp_path, monkeypatch):
    blocks = re.findall(r"\.\. code-block:: python\n\n((?:   .*\n|\n)+)", README.read_text("utf-8"))
    assert len(blocks) == 5
    assert "GPipe(nn.Sequential(a, b, c, d), balance=[2, 2], chunks=8)" in blocks[0]

    # The accelerators of a machine may be fewer than the partitions of the README.
    monkeypatch.setattr("torchgpipe.gpipe.accelerators", list)
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    a, b, c, d = layers
    names = {
        "GPipe": GPipe,
        "F": F,
        "nn": nn,
        "torch": torch,
        "layers": layers,
        "path": tmp_path / "model.pt",
        "loader": [(torch.rand(16, 4), torch.randint(4, (16,)))] * 2,
        "a": a,
        "b": b,
        "c": c,
        "d": d,
    }
    for block in blocks:
        exec(compile(dedent(block), str(README), "exec"), names)

    assert all(p.grad is not None for p in layers.parameters())
    assert list(torch.load(names["path"])) == list(layers.state_dict())
