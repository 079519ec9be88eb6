"""Skips through the pipeline: the values and gradients of the plain module, and errors."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.helpers import CPUS, MODES, assert_same, nodes, note_of, plain, run_pipeline
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash

KINDS = ["layer", "input", "output", "view", "none", "constant", "unused", "integer", "nested"]
WIDTH = 3


def mix(stashes, pops):
    """A layer that pops some skips, computes, and stashes some; each skip has a kind."""

    @skippable(stash=list(stashes), pop=list(pops))
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, input):
            x = self.linear(input).tanh()
            for name, kind in pops.items():
                y = yield pop(name)
                if kind == "none":
                    assert y is None
                elif kind == "nested":
                    assert (y["n"], y["x"][1], y["x"][2].dtype) == (3, None, torch.bool)
                    x = x * y["x"][0].sigmoid()
                elif kind != "unused":
                    x = x * y.sigmoid()
            for name, kind in stashes.items():
                if kind == "none":
                    yield stash(name, None)
                elif kind == "nested":
                    yield stash(name, {"x": [x.exp(), None, x > 0], "n": 3})
                elif kind == "input":
                    yield stash(name, input)
                elif kind == "output":
                    yield stash(name, x)
                elif kind == "view":
                    yield stash(name, x[:, :1])
                elif kind == "constant":
                    yield stash(name, x.detach().exp())
                elif kind == "integer":
                    yield stash(name, x.detach().argmax(dim=-1, keepdim=True))
                else:
                    yield stash(name, x.exp())
            return x

    return Mix()


@st.composite
def models(draw):
    """Layers with random skips among them, and a random balance."""
    n = draw(st.integers(2, 7))
    ends = st.tuples(st.integers(0, n - 2), st.integers(1, n - 1)).filter(lambda e: e[0] < e[1])
    skips = draw(st.lists(st.tuples(ends, st.sampled_from(KINDS)), max_size=6))
    stashes, pops = [{} for _ in range(n)], [{} for _ in range(n)]
    for k, ((source, target), kind) in enumerate(skips):
        stashes[source][f"skip {k}"] = pops[target][f"skip {k}"] = kind
    torch.manual_seed(draw(st.integers(0, 99)))
    layers = [mix(a, b) for a, b in zip(stashes, pops)]
    cuts = draw(st.sets(st.integers(1, n - 1), max_size=4))
    return layers, [b - a for a, b in pairwise([0, *sorted(cuts), n])]


@settings(max_examples=100)
@given(
    models(),
    st.integers(1, 4),
    st.integers(0, 4),
    st.booleans(),
    st.sampled_from([[0, 0, 0, 0, 0], [0, 1, 2, 3, 0], [0, 0, 1, 1, 0], [1, 0, 1, 0, 1]]),
)
def test_parity(model, chunks, checkpointed, requires_grad, places):
    layers, balance = model
    taken = iter(layers)
    partitions = [nn.Sequential(*[next(taken) for _ in range(size)]) for size in balance]
    devices = [CPUS[k] for k in places[: len(partitions)]]
    x = torch.rand(5, WIDTH, requires_grad=requires_grad)
    leaves = [p for layer in layers for p in layer.parameters()] + [x] * requires_grad

    expected = plain(nn.Sequential(*layers), x, chunks)
    output = run_pipeline(partitions, devices, x, chunks=chunks, checkpointed=checkpointed)
    assert_same(output, expected, leaves)


@settings(max_examples=30)
@given(models(), st.integers(1, 4), st.sampled_from(MODES))
def test_parity_of_wrapped_models(model, chunks, mode):
    layers, balance = model
    reference = nn.Sequential(*copy.deepcopy(layers))
    wrapped = GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
    )
    x = torch.rand(4, WIDTH)
    expected = plain(reference, x, chunks)
    expected.sum().backward()
    for twin in (wrapped, copy.deepcopy(wrapped)):
        output = twin(x)
        assert torch.equal(output, expected)
        output.sum().backward()
        for p, q in zip(reference.parameters(), twin.parameters()):
            assert torch.allclose(p.grad, q.grad, atol=1e-6)
        twin.eval()
        with torch.no_grad():
            assert torch.equal(twin(x), expected)


def test_skip_that_was_not_stashed(device):
    """The layer that declares the skip does not run."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mix({"x": "layer"}, {})

        def forward(self, x):
            return x

    layers = nn.Sequential(Block(), mix({}, {"x": "layer"})).to(device)
    model = GPipe(layers, [1, 1], devices=[device] * 2)
    with pytest.raises(RuntimeError, match="must be stashed by an earlier layer.*'x'") as caught:
        model(torch.rand(2, WIDTH, device=device))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0"


class Block(nn.Module):
    """A layer that stashes and pops within itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(mix({"x": "layer"}, {}), nn.Tanh(), mix({}, {"x": "layer"}))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("balance", [[4], [1, 1, 1, 1], [1, 2, 1]])
@pytest.mark.parametrize("checkpoint", MODES)
def test_blocks_that_stash_and_pop_within_themselves(balance, checkpoint):
    """Blocks of this kind need no namespaces, even where they are repeated, copied or nested."""
    block = Block()
    module = nn.Sequential(block, Block(), nn.Sequential(Block(), Block()), copy.deepcopy(block))
    reference = copy.deepcopy(module)
    model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint)
    x = torch.rand(6, WIDTH)
    output = model(x)
    assert torch.equal(output, plain(reference, x, 3))
    output.sum().backward()
    plain(reference, x, 3).sum().backward()
    for p, q in zip(reference.parameters(), model.parameters()):
        assert torch.allclose(p.grad, q.grad, atol=1e-6)


def test_layers_of_one_class():
    """Layers of a U-Net are so: the skip stashed last is popped first."""
    spaces = [Namespace() for _ in range(3)]

    @skippable(stash=["x"])
    class Down(nn.Module):
        def forward(self, input):
            yield stash("x", input)
            return input * 2

    @skippable(pop=["x"])
    class Up(nn.Module):
        def forward(self, input):
            return input + (yield pop("x"))

    layers = [Down().isolate(ns) for ns in spaces] + [Up().isolate(ns) for ns in reversed(spaces)]
    x = torch.rand(4, 1)
    model = GPipe(nn.Sequential(*layers), [1] * 6, devices=["cpu"] * 6, chunks=2)
    assert torch.allclose(model(x), 15 * x)


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_devices_between_see_nothing(checkpointed):
    """A skip is copied once, straight from the device that stashed it, and not on the way."""
    partitions = [
        nn.Sequential(mix({"x": "layer"}, {})),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(nn.Tanh()),
        nn.Sequential(mix({}, {"x": "layer"})),
    ]
    x = torch.rand(3, WIDTH, requires_grad=True)
    output = run_pipeline(partitions, CPUS, x, chunks=3, checkpointed=checkpointed)
    copies = [node for node in nodes(output) if node.name() == "CopyBackward"]
    # Three boundaries that the value crosses, and the skip.
    assert len(copies) == 3 * 4


@pytest.mark.parametrize("mode", MODES)
def test_error_in_a_generator_names_the_cell(mode):
    @skippable(stash=["x"])
    class Fail(nn.Module):
        def forward(self, input):
            yield stash("x", input)
            raise KeyError("why")

    layers = nn.Sequential(nn.Linear(1, 1), Fail(), mix({}, {"x": "unused"}))
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=2, checkpoint=mode)
    with pytest.raises(KeyError, match="why") as caught:
        model(torch.rand(2, 1))
    assert note_of(caught.value) == "raised in partition 1, micro-batch 0, layer 1 (Fail)"
