"""Values of any structure on several devices: right, without races, in the usual time."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.virtual.stages import SEEDS, Stage, limit, makespans, own_streams
from torchgpipe import GPipe, NoChunk
from torchgpipe.testing import observe

N, CHUNKS, ROWS, WIDTH = 4, 3, 7, 3


@dataclass
class State:
    hidden: Tensor
    mask: Tensor | None
    steps: int


torch.export.register_dataclass(State)


class Weighted(nn.Module):
    """A layer that calls a function of the value and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(WIDTH).double())

    def forward(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


def opened(weight, x, table, ids, *, scale, options):
    """A function from arguments to a value of all kinds of items."""
    x = x * weight + table[ids] * scale
    return {
        "state": State(x, ids > 0, options["steps"]),
        "table": table,
        "scale": scale,
        "rest": [x.cos(), (ids, None), "name", x.sum()],
        "twice": x,
    }


def passed(weight, value):
    """Compute with one part of a value that has a tensor in two places, and put integers first."""
    state = value["state"]
    hidden = (state.hidden @ value["table"].t() @ value["table"]).tanh() * weight
    rest = [value["rest"][3] * 0.5, *value["rest"][:3]]
    return {
        "ids": rest[2][0] + 1,
        **{key: x for key, x in value.items() if key != "ids"},
        "state": State(hidden, state.mask, state.steps + 1),
        "rest": [*rest[1:], rest[0]],
    }


def closed(weight, value):
    state = value["state"]
    x = state.hidden * weight + value["twice"] * value["scale"] + value["rest"][0]
    x = x.masked_fill(state.mask[:, None], 0.5)
    return {
        "x": x,
        "loss": x.square().mean() + value["rest"][3],
        "ids": value["ids"],
        "best": (x.argmax(1), x.argmax()),
        "name": (value["rest"][2], state.steps, None),
    }


def layers():
    return [Weighted(opened), Weighted(passed), Weighted(passed), Weighted(closed)]


def arguments(device, requires_grad):
    def leaf(*shape):
        return torch.rand(shape, dtype=torch.float64).to(device).requires_grad_(requires_grad)

    ids = torch.arange(ROWS, device=device) % 4
    scale, table = leaf(), leaf(4, WIDTH)
    return (leaf(ROWS, WIDTH), NoChunk(table), ids), {"scale": scale, "options": {"steps": 1}}


def leaves_of(args, kwargs):
    x, table, _ = args
    return [x, table.value, kwargs["scale"]]


def to(device, value):
    return tree_map_only(Tensor, lambda x: x.to(device), value)


def reference(model, args, kwargs):
    """Run the layers, micro-batch by micro-batch, without the library."""
    outputs = []
    x, table, ids = args
    first, *rest = model.module
    for some, their in zip(x.tensor_split(CHUNKS), ids.tensor_split(CHUNKS)):
        value = first(some, table.value, their, **kwargs)
        for layer in rest:
            value = layer(to(layer.weight.device, value))
        outputs.append(value)
    return {
        "x": torch.cat([output["x"] for output in outputs]),
        "loss": torch.stack([output["loss"] for output in outputs]),
        "ids": torch.cat([output["ids"] for output in outputs]),
        "best": (
            torch.cat([output["best"][0] for output in outputs]),
            torch.stack([output["best"][1] for output in outputs]),
        ),
        "name": outputs[0]["name"],
    }


def step(run, model, args, kwargs):
    """Outputs, whether each has a gradient, and all gradients."""
    output = run(*args, **kwargs)
    loss = output["x"].square().sum() + output["loss"].sum()
    leaves = [x for x in [*leaves_of(args, kwargs), *model.parameters()] if x.requires_grad]
    wanted = tree_map_only(Tensor, lambda x: x.requires_grad, output)
    gradients = torch.autograd.grad(loss, leaves)
    return tree_leaves([tree_map_only(Tensor, torch.detach, output), wanted, gradients])


PLACES = [[0, 1, 2, 3], [0, 0, 1, 0]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_values(devices, place, requires_grad, mode):
    model = GPipe(
        nn.Sequential(*layers()),
        [1] * N,
        devices=[devices[k] for k in place],
        chunks=CHUNKS,
        checkpoint=mode,
    )
    args, kwargs = arguments(devices[0], requires_grad)
    expected = step(lambda *args, **kwargs: reference(model, args, kwargs), model, args, kwargs)
    for seed in SEEDS[requires_grad::2]:
        with own_streams(devices, wanted=seed % 2 == 1), observe(jitter=seed) as seen:
            for _ in range(2):
                found = step(model, model, args, kwargs)
        assert_no_races(seen)
        for a, b in zip(found, expected):
            assert type(a) is type(b)
            if isinstance(b, Tensor):
                assert (a.dtype, a.device) == (b.dtype, b.device)
                assert torch.allclose(a, b, rtol=1e-10)
            else:
                assert a == b


# Time.


class DictStage(Stage):
    """A stage that passes on a dict, and uses each tensor of the dict."""

    def forward(self, value):
        x = super().forward(value["x"] + value["bias"] * value["scale"])
        x = x.masked_fill(value["ids"][:, None] < 0, 0)
        return {"ids": value["ids"], "n": value["n"] + 1, **value, "x": x}


class Called:
    """A model that calls the wrapper with more than a tensor."""

    def __init__(self, model, requires_grad):
        self.model, self.chunks, self.devices = model, model.chunks, model.devices
        device = model.devices[0]
        self.bias = torch.rand(4, device=device, requires_grad=requires_grad)
        self.scale = torch.rand((), device=device, requires_grad=requires_grad)

    def __call__(self, x):
        ids = torch.arange(len(x), device=x.device)
        value = {"ids": ids, "x": x, "bias": NoChunk(self.bias), "n": 1, "scale": self.scale}
        return self.model(value)["x"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8)])
def test_dicts_take_no_more_time(devices, n, m, requires_grad, mode):
    model = wrap([DictStage() for _ in range(n)], devices[:n], mode, m)
    for seed in SEEDS[requires_grad::2]:
        with own_streams(devices, wanted=seed % 2 == 1):
            found = makespans(Called(model, requires_grad), seed=seed, requires_grad=requires_grad)
        assert found == [limit(mode, n, m)] * 2, f"jitter {seed}"


class FrozenStage(nn.Module):
    """A stage that saves only its weight, so that it needs no recomputation."""

    def __init__(self):
        super().__init__()
        self.stage = Stage()
        self.stage.requires_grad_(False)

    def forward(self, value):
        return value | {"x": self.stage(value["x"])}


@pytest.mark.parametrize("mode", MODES)
def test_frozen_stages_before_what_is_trained_take_no_time_in_backward(devices, mode):
    model = wrap(
        [FrozenStage(), FrozenStage(), DictStage(), DictStage()], devices[:4], mode, chunks=8
    )
    called = Called(model, requires_grad=False)
    # The first step copies frozen parameters, to see whether layers change them.
    makespans(called, seed=0, steps=1)
    (found,) = makespans(called, seed=0, steps=1)
    assert found == limit(mode, 2, 8) + 2
