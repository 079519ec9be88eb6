"""The map ``"auto"`` fits into the memory of the devices, and its memory is what is measured."""

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from tests.support.mapping import GPT, EncoderDecoder, measured, tokens
from tests.support.size import some
from torchgpipe import MappedGPipe
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.partition.keeping import checkpointed
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import Footprint, recorded
from torchgpipe.planner.given import USABLE
from torchgpipe.planner.maps import Units

# Embedding and head are one weight, used on the streams of two visits.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

ROWS = 4


def equal(model, blocks, *_):
    """Each block takes one second."""
    return dict.fromkeys(blocks, 1.0)


@pytest.fixture
def alike(monkeypatch):
    """Have all blocks take the same time."""
    monkeypatch.setattr(maps, "timed", equal)


@pytest.fixture
def usable(monkeypatch):
    """Give devices so many bytes to use, by the devices."""

    def give(limits):
        monkeypatch.setattr(
            "torchgpipe.planner.given.memory_total",
            lambda device: limits.get(device, float("inf")) / USABLE,
        )

    return give


def predicted(model, sizes, devices, arguments, chunks, mode):
    """The device map with so many units on each device, and the memory that it is said to take."""
    blocks = Wholes.of(model).blocks()
    units = Units(blocks, equal(model, blocks))
    calls = recorded(model, blocks, arguments, {})
    found = []
    for a, b in pairwise(accumulate(sizes, initial=0)):
        own = {x for names in [*units.members.values()][a:b] for x in names}
        own = own if a else {*own, None}
        again = checkpointed(mode, chunks)
        footprint = Footprint(model, blocks, calls, chunks, again, 2.0)
        found.append(footprint.need(own))
    return units.placed(devices, sizes), found


class WithLogits(GPT):
    """A GPT with many words, which returns a loss and what the loss was computed from."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(self.head.in_features, 3000)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return CausalLMOutput(loss=loss, logits=logits)


MODELS = {
    "logits": (WithLogits, 1, [3, 3, 3]),
    "blocks": (GPT, 1, [3, 3, 3]),
    "loss outside": (partial(GPT, has_loss=False), 1, [3, 3, 3]),
    "tied head": (partial(GPT, tied=True), 1, [3, 3, 3]),
    "pair": (EncoderDecoder, 2, [3, 3, 3]),
}


MODES = ["never", "except_last", "always"]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("chunks", some([1, 2, 8], [4]))
@pytest.mark.parametrize("name", MODELS)
def test_prediction_is_what_is_measured(devices, name, chunks, mode):
    make, count, sizes = MODELS[name]
    model, places = make(), devices[: len(sizes)]
    arguments = tuple([tokens(ROWS) for _ in range(count)])
    device_map, found = predicted(model, sizes, places, arguments, chunks, mode)
    whole = [tokens(ROWS * chunks) for _ in range(count)]
    memory = measured(copied(make), device_map, whole, chunks, mode)
    for most, place in zip(found, memory):
        # Logits that the root's own code keeps are there for fewer micro-batches than are counted.
        assert 0.96 * memory[place] <= most <= 2.1 * memory[place]


WIDES = (1024, 1024, 256, 64, 64, 64)


def auto(model, devices, chunks, mode="never", memory=None):
    """The map that is chosen."""
    options = {"devices": devices, "chunks": chunks, "checkpoint": mode, "memory": memory}
    return MappedGPipe(model, "auto", sample=tokens(ROWS), **options).device_map


def copied(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize(
    ("mode", "form"),
    [("always", "device"), *some([("never", "one"), ("never", "each")], [])] + [("never", "table")],
)
def test_limits(devices, usable, mode, form):
    """A limit, of devices or given, moves blocks to another device, and the peak stays below it."""
    make, m, places = partial(GPT, WIDES), 4, devices[:2]
    whole = [tokens(ROWS * m)]
    fastest = auto(copied(make), places, m, mode)
    before = measured(copied(make), fastest, whole, m, mode)
    # More is counted than a step takes, and a share of the limit stays free.
    limit = int(1.25 * before[places[0]])
    memory = {
        "device": usable(dict.fromkeys(places, limit)) if form == "device" else None,
        "one": limit,
        "each": [f"{limit / 1024:.3f}KiB", 2**40],
        "table": {places[0].index: limit, places[1]: "1TiB", "cpu": "1GB"},
    }[form]
    found = auto(copied(make), places, m, mode, memory)
    assert fastest["blocks.2"] == places[0]
    assert found["blocks.2"] == places[1]
    assert measured(copied(make), found, whole, m, mode)[places[0]] <= limit


@pytest.mark.usefixtures("alike")
def test_nothing_fits(devices, usable):
    model, places = GPT(), devices[:2]
    usable(dict.fromkeys(places, 1e6))
    with pytest.raises(ValueError, match="must fit into the memory") as caught:
        auto(model, places, 4)
    text = str(caught.value)
    assert f"{places[0]} lacks " in text
    assert "(chunks: 4, checkpoint: never, the nearest map: " in text
    assert "checkpoint='always', a larger limit as memory, or smaller micro-batches" in text
    # Neither the model nor its gradients are changed.
    assert {x.device.type for x in model.parameters()} == {"cpu"}
    assert all(x.grad is None for x in model.parameters())
    with pytest.raises(ValueError, match="use more devices, a larger limit"):
        auto(model, places, 4, "always")
    with pytest.raises(ValueError, match=f"{places[1]} lacks .* bytes, and may fill 8500"):
        auto(model, places, 4, memory={places[0]: "1TiB", places[1]: 1e4})


@pytest.mark.usefixtures("alike")
def test_a_copy_of_a_tied_weight_takes_memory(devices, usable):
    """The head has a copy of the embedding, so its device gets fewer of the blocks between."""
    make, places, m = partial(GPT, tied=True), devices[:2], 4
    fastest = auto(copied(make), places, m)
    assert [fastest["embed"], fastest["head"]] == places
    whole = [tokens(ROWS * m)]
    limit = 1.2 * measured(copied(make), fastest, whole, m, "never")[places[1]]
    usable({places[1]: limit})
    found = auto(copied(make), places, m)
    assert [*found.values()].count(places[1]) < [*fastest.values()].count(places[1])
    assert measured(copied(make), found, whole, m, "never")[places[1]] <= limit


class Lower(GPT):
    """A GPT whose embedding and first blocks are frozen."""

    def __init__(self):
        super().__init__()
        for frozen in (self.embed, *self.blocks[:3]):
            frozen.requires_grad_(False)


@pytest.mark.parametrize("mode", some(["never", "always"], ["always"]))
def test_blocks_that_look_alike_and_are_frozen(devices, mode):
    """The blocks have the same weights, and some of them keep nothing for backward."""
    model = Lower()
    device_map, found = predicted(model, [3, 3, 3], devices[:3], (tokens(ROWS),), 4, mode)
    memory = measured(model, device_map, [tokens(ROWS * 4)], 4, mode)
    for most, place in zip(found, memory):
        assert 0.96 * memory[place] <= most <= 1.6 * memory[place]


class Reentrant(GPT):
    """A GPT whose blocks compute again by themselves, in a way that takes part in no other one."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x)).square().mean()


@pytest.mark.usefixtures("alike")
def test_a_sample_whose_backward_fails(devices, usable):
    """The memory is seen in forward alone."""
    usable(dict.fromkeys(devices, 2**30))
    assert len({*auto(Reentrant(), devices[:2], 2).values()}) == 2
