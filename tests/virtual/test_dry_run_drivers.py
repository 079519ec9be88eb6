"""Dry runs of each wrapper, and of Transformers' models: the same figures as with values."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.examples import MISSING
from tests.support.architectures import build
from tests.support.dry import HARDWARE, dry, real
from tests.support.size import some
from torchgpipe import GPipe, MappedGPipe, Offload, ScheduledLoss
from torchgpipe.engine.stages import stages_of
from torchgpipe.testing import dry_run

CLASSES = 10


@pytest.fixture(autouse=True)
def _exact():
    """Have the collector free nothing within a step."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def compare(make, devices, value_read=None):
    """Threads of autograd's free what they have copied sooner or later, in either run."""
    allocated, _, time = dry(make, devices, value_read)
    expected, _, expected_time = real(make, devices)
    assert time == pytest.approx(expected_time, rel=1e-12)
    assert allocated == pytest.approx(expected, rel=0.005)


def driven(wrap):
    """A function that makes a step over two devices by a wrapper, which gives the loss."""

    def make(devices):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), nn.GELU()) for _ in "abc"]
        layers = nn.Sequential(*blocks, nn.Linear(128, CLASSES))
        loss, parameters = wrap(layers, devices)
        optimizer = torch.optim.Adam(parameters)
        input = torch.rand(8, 128).to(devices[0])

        def step():
            optimizer.zero_grad()
            loss(input, target).backward()
            optimizer.step()

        target = torch.randint(CLASSES, (8,))
        return step

    return make


def scheduled(schedule, mode="except_last", folded=False, **more):
    def wrap(layers, devices):
        devices = [*devices, *devices[::-1]] if folded else devices
        balance = [1] * 4 if folded else [2, 2]
        model = GPipe(layers, balance, devices=devices, chunks=4, checkpoint=mode)
        training = ScheduledLoss(model, cross_entropy, schedule, **more)
        return lambda x, y: training(x, y.to(devices[-1])), [*model.parameters()]

    return wrap


def gpipe(layers, devices):
    model = GPipe(layers, [2, 2], devices=devices, chunks=4)
    return lambda x, y: cross_entropy(model(x), y.to(devices[1])), [*model.parameters()]


def mapped(layers, devices):
    places = {str(k): devices[k // 2] for k in range(4)}
    model = MappedGPipe(layers, places, chunks=4, checkpoint="never")
    return lambda x, y: cross_entropy(model(x), y.to(devices[1])), [*model.parameters()]


DRIVERS = {
    "gpipe": gpipe,
    "zbh1": scheduled("zbh1"),
    "1f1b, offload": scheduled("1f1b", "offload"),
    "1f1b, half": scheduled("1f1b", Offload(share=0.5)),
    "zbv": scheduled("zbv", folded=True),
    "zbv, always": scheduled("zbv", "always", folded=True),
    "dualpipev": scheduled("dualpipev", folded=True),
    "1f1b, graphs": scheduled("1f1b", stages="graph"),
    "zbh1, graphs": scheduled("zbh1", stages="graph"),
    "dualpipev, graphs": scheduled("dualpipev", folded=True, stages="graph"),
    "mapped": mapped,
}


#: GPipe, one of two stages on a worker, of graphs, of a map, and of cells that leave.
FEW = ["gpipe", "zbv, always", "dualpipev, graphs", "mapped", "1f1b, half"]


@pytest.mark.parametrize("name", some([*DRIVERS], FEW))
def test_drivers(devices, name):
    compare(driven(DRIVERS[name]), devices[:2])


MAPS = {
    "llama": ("model.embed_tokens", "model.layers", "model.norm", "lm_head"),
    "gpt2": ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
}


@pytest.mark.parametrize(
    ("name", "mode", "adapted"),
    some(
        [("llama", "never", False), ("llama", "always", True), ("gpt2", "except_last", False)],
        [("llama", "always", True)],
    ),
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_transformers(devices, name, mode, adapted):
    """Values are read where the model asks whether all tokens are of one sequence, as here."""

    def make(devices):
        torch.manual_seed(0)
        model, inputs = build(name)
        ids = inputs["input_ids"]
        before = ""
        if adapted:
            peft = pytest.importorskip("peft", exc_type=MISSING)
            config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
            model, before = peft.get_peft_model(model, config), "base_model.model."
        first, blocks, norm, head = MAPS[name]
        places = {first: 0, norm: 1, head: 1, f"{blocks}.0": 0, f"{blocks}.1": 0, f"{blocks}.2": 1}
        others = {"llama": {"model.rotary_emb": 0}, "gpt2": {"transformer.wpe": 0}}[name]
        device_map = {before + x: devices[y] for x, y in {**places, **others}.items()}
        pipe = MappedGPipe(model, device_map, chunks=2, checkpoint=mode)
        optimizer = torch.optim.AdamW([x for x in pipe.parameters() if x.requires_grad])

        def step():
            optimizer.zero_grad()
            pipe(input_ids=ids, labels=ids).loss.mean().backward()
            optimizer.step()

        return step

    compare(make, devices[:2], value_read=1.0)


def test_memory_of_the_host(devices):
    """The pinned memory for cells that leave is that of the same step with values, and is told."""
    models = []

    def wrap(layers, devices):
        model = GPipe(layers, [2, 2], devices=devices, chunks=4, checkpoint="offload")
        models.append(model)
        return lambda x, y: cross_entropy(model(x), y.to(devices[-1])), [*model.parameters()]

    found = dry_run(driven(wrap), 2, HARDWARE)
    real(driven(wrap), devices[:2])
    first, second = (
        sum(sum(x.sizes) for x in stages_of(model).pool._hosts.values()) for model in models
    )
    assert found.host >= first == second > 0
    assert "pinned memory of the host: " in str(found)
    assert {x.kind for x in found.timeline.spans} >= {"out", "back"}


def test_values_are_read_from_pinned_memory_no_more_than_elsewhere(devices):
    def make(devices):
        layer = nn.Linear(2, 2).to(devices[0])
        pinned = torch.empty(2, pin_memory=True)
        return lambda: pinned.copy_(layer(torch.ones(2, device=devices[0])), non_blocking=True)

    with pytest.raises(RuntimeError, match="computes no values"):
        dry_run(make, 1, HARDWARE)
