"""Other libraries do what docs/coming_from.rst tells of them: keys, hooks and scales."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn

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


@pytest.fixture
def alone():
    """A process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def pipelined(layers, loss=F.mse_loss, **options):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    stage = PipelineStage(layers, 0, 1, torch.device("cpu"))
    found = []
    runner = ScheduleGPipe(stage, 4, loss_fn=loss, **options)
    runner.step(torch.ones(8, 4), target=torch.zeros(8, 2), losses=found)
    return found


@pytest.mark.skipif(VERSION < (2, 13), reason="the page is about PyTorch 2.13")
def test_what_changes_from_pipelining(alone):
    from torchgpipe.distributed import Pipe

    def step(layers):
        model = Pipe(layers, [2], loss=F.mse_loss, schedule="1f1b", chunks=4)
        return model.step(torch.ones(8, 4), torch.zeros(8, 2))

    theirs, ours = [nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)) for _ in range(2)]
    fired = [[], []]
    for layers, calls in zip((theirs, ours), fired):
        layers[1].weight.register_hook(calls.append)
    assert (len(pipelined(theirs)), step(ours).shape) == (4, ())
    assert [len(calls) for calls in fired] == [4, 1]
    assert [int(x[0].num_batches_tracked) for x in (theirs, ours)] == [5, 4]


@pytest.mark.skipif(VERSION < (2, 13), reason="the page is about PyTorch 2.13")
def test_sums_in_pipelining(alone):
    layers = nn.Sequential(nn.Linear(4, 2))
    pipelined(layers, partial(F.mse_loss, reduction="sum"), scale_grads=False)
    found = layers[0].weight.grad.clone()
    layers.zero_grad()
    F.mse_loss(layers(torch.ones(8, 4)), torch.zeros(8, 2), reduction="sum").backward()
    assert found.allclose(layers[0].weight.grad)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    plain = [*Model().state_dict()]
    model = accelerate.dispatch_model(Model(), {"": "cpu"}, force_hooks=True)
    assert [*model.state_dict()] == plain
    assert [*MappedGPipe(model, {"": "cpu"}, chunks=2).state_dict()] == plain
