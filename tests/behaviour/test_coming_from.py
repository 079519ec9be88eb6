"""Other libraries do what docs/coming_from.rst tells of them: keys, hooks and scales."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from torchgpipe import MappedGPipe
from torchgpipe._torch.dynamo import VERSION

PAGE = (Path(__file__).parents[2] / "docs/coming_from.rst").read_text("utf-8")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4, bias=False)

    def forward(self, input):
        return self.lin(input).relu()


class Model(nn.Module):
    """Model that has the names of the page."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2, bias=False)

    def forward(self, input):
        hidden = self.emb(input)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.skipif(VERSION < (2, 13), reason="the page is about PyTorch 2.13")
@pytest.mark.filterwarnings("ignore")
def test_pipelining():
    from torch.distributed.pipelining import SplitPoint, pipeline

    split = {"layers.1": SplitPoint.BEGINNING}
    pipe = pipeline(Model(), mb_args=(torch.rand(2, 4),), split_spec=split)
    keys = [*pipe.state_dict()]
    assert re.findall(r'"(split_gm\.\S+)": \d', PAGE) == keys
    stages = [[*pipe.get_stage_module(k).state_dict()] for k in range(2)]
    line = re.search(r"stages = (\[\{\"emb.+)", PAGE)[1]
    assert [[*stage] for stage in eval(line)] == stages


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    plain = [*Model().state_dict()]
    model = accelerate.dispatch_model(Model(), {"": "cpu"}, force_hooks=True)
    assert [*model.state_dict()] == plain
    assert [*MappedGPipe(model, {"": "cpu"}, chunks=2).state_dict()] == plain
