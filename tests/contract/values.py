"""Values, losses and gradients."""

from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from tests.contract.comparing import assert_as_plain, layers_of
from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step
from tests.support.structures import (
    Custom,
    Partial,
    Point,
    Registered,
    integers,
    passed,
    rows,
    summed,
)
from torchgpipe import NoChunk, arguments


def batch(rows, model, size=6):
    """An input and a target."""
    x, y = torch.rand(2, rows, size)
    return x, y, x.to(model.first), y.to(model.last)


@promise(
    "Outputs, losses and gradients are those of the plain model, step after step.",
    modes=True,
    devices=True,
)
def parity(make):
    layers = linears(6, 8, 6)
    model = make(layers)
    for _ in range(3):
        x, y, *moved = batch(8, model)
        expected = plain_step(layers, x, y)
        torch.testing.assert_close(model.step(*moved).cpu(), expected)
        torch.testing.assert_close(model.forward(moved[0]).detach().cpu(), layers(x).detach())
        assert_same_grads(model, layers)


@promise("A mini-batch may have any number of rows, also fewer than micro-batches.", modes=True)
def any_rows(make):
    layers = linears(6, 6, 6)
    model = make(layers)
    for count in make.some((7, 3, 1, 8)):
        x, y, *moved = batch(count, model)
        expected = plain_step(layers, x, y)
        torch.testing.assert_close(model.step(*moved).cpu(), expected)
        assert_same_grads(model, layers)


#: A value of each sort, with a tensor of four rows in it.
VALUES = {
    "tuple": lambda: (rows(4), integers(4)),
    "list": lambda: [rows(4), integers(4)],
    "dict": lambda: {"x": rows(4), "mask": integers(4) > 2},
    "ordered dict": lambda: OrderedDict(b=rows(4), a=integers(4)),
    "default dict": lambda: defaultdict(list, x=rows(4)),
    "named tuple": lambda: Point(rows(4), integers(4)),
    "structseq": lambda: rows(4, requires_grad=False).max(dim=1),
    "dataclass": lambda: Registered(rows(4), integers(4) > 1),
    "dataclass with None": lambda: Registered(rows(4), None, scale=3.0),
    "class of one's own": lambda: Custom([rows(4), integers(4)], "label"),
    "None": lambda: (None, rows(4), None),
    "numbers and flags": lambda: (1, rows(4), 2.5, True),
    "text": lambda: {"name": "x", "x": rows(4)},
    "others": lambda: (rows(4), torch.float16, torch.device("cpu"), slice(2), int),
    "no dimension": lambda: (rows(4), torch.tensor(2.0, requires_grad=True), torch.tensor(3)),
    "empty containers": lambda: (rows(4), (), [], {}),
    "deep": lambda: {"a": [(rows(4), Point({"b": rows(4)}, [integers(4)])), None], "c": ((3,),)},
    "alone in a tuple": lambda: (rows(4),),
    "one in two places": lambda: [x := rows(4), {"again": x}],
}


def checked_values(make, names):
    for name in make.some(names):
        assert_as_plain(make, layers_of(passed, passed, passed), VALUES[name]())


@promise(
    "Nested lists, tuples, dicts and named tuples pass into the model, between its layers, and out "
    "of it.",
    modes=True,
    devices=True,
)
def containers(make):
    checked_values(make, [*VALUES][:7])


@promise(
    "So do dataclasses, and classes of one's own that PyTorch knows as containers.",
    modes=True,
    devices=True,
)
def classes(make):
    checked_values(make, [*VALUES][7:10])


@promise(
    "Beside the tensors in a value may be None, numbers, texts, other objects, tensors without a "
    "dimension, and empty containers.",
    modes=True,
)
def others(make):
    checked_values(make, [*VALUES][10:])


def attend(x, mask=None, *more, scale=1.0, bias=None):
    x = x * scale
    if mask is not None:
        x = x.masked_fill(mask[:, None], 0)
    if bias is not None:
        x = x + bias["bias"]
    return sum(more, x)


CALLS = [
    lambda: arguments(rows(4), integers(4) > 1),
    lambda: arguments(rows(4), None, rows(4), rows(4)),
    lambda: arguments(rows(4), mask=integers(4) > 1, scale=2.0),
    lambda: arguments(rows(4), scale=torch.tensor(2.0), bias={"bias": rows(4)}),
    lambda: arguments(rows(4), bias={"bias": NoChunk(rows(1))}),
    lambda: arguments(x=rows(4), mask=integers(4) > 1),
]


@promise("The first layer takes several arguments, by position and by name.", modes=True)
def several_arguments(make):
    for call in make.some(CALLS):
        assert_as_plain(make, layers_of(attend, passed), call())


@promise(
    "What NoChunk marks, wherever it is in the input, comes whole to each micro-batch; so does a "
    "tensor without a dimension, and the gradients of all micro-batches add up.",
    modes=True,
    devices=True,
)
def not_split(make):
    def mixed(value):
        x, whole, scale, named = value
        return (x @ whole * scale + named["a"][0].sum()).sin(), whole

    def again(value):
        return value[0] @ value[1]

    whole = torch.rand(3, 3, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    for chunks in make.some((2, 1, 3)):
        value = rows(6), NoChunk(whole), scale, {"a": NoChunk([rows(2), None, "text"])}
        assert_as_plain(make, layers_of(mixed, again), value, chunks=chunks)
    assert_as_plain(make, layers_of(passed, summed), [rows(4), NoChunk({"a": rows(1), "b": 3})])


@promise(
    "One tensor may be in an input twice, once to be split and once whole.",
    modes=True,
    eager=True,
)
def split_and_whole(make):
    both = rows(6)
    layers = layers_of(passed, lambda v: v[0] @ v[1].t() @ v[1] * v[2], passed)
    assert_as_plain(make, layers, [both, NoChunk(both), both], chunks=3)


class Made(nn.Module):
    """A layer that computes with its weight alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, n):
        return (self.weight * (n or 2)).sum()


@promise("What passes between layers needs no tensor in it.", modes=True)
def no_tensor_between(make):
    for nothing in (lambda x: None, lambda x: 3):
        assert_as_plain(make, layers_of(passed, Partial(nothing), Partial(passed), Made()), rows(4))


@promise("Layers may change the containers that they get: each run has its own.")
def changed_containers(make):
    def change(value):
        value["x"] = value.pop("y") + value.pop("z")[0].tanh()
        return value

    value = {"x": integers(4), "y": rows(4), "z": [rows(4)]}
    for layers in (layers_of(passed, change, passed), layers_of(change, passed)):
        model = assert_as_plain(make, layers, value, mode="always")
        model.step(value)
        assert set(value) == {"x", "y", "z"}


class ModelOutput(OrderedDict):
    """A dict whose entries are attributes, too, and which is no plain dict for PyTorch."""

    def __getattr__(self, name):
        return self[name]


register_pytree_node(
    ModelOutput,
    lambda x: ([*x.values()], [*x]),
    lambda values, names: ModelOutput(zip(names, values)),
)


@promise("Classes of outputs as Transformers has them pass and come out.", modes=True)
def model_outputs(make):
    layers = layers_of(
        nn.Linear(3, 3),
        lambda x: ModelOutput(logits=x, cache=[x.detach(), None]),
        lambda v: ModelOutput(logits=v.logits.sin(), cache=v.cache, loss=v.logits.square().mean()),
    )
    model = assert_as_plain(make, layers, rows(4))
    assert type(model.output) is ModelOutput
    assert [*model.output] == ["logits", "cache", "loss"]


@promise(
    "An object that is no container comes to each layer, and out, as it is.",
    modes=True,
    otherwise={"Pipe": Otherwise("another process gets a copy, by pickle", "^a copy")},
)
def objects(make):
    thing = SimpleNamespace(x=torch.rand(2))
    layers = layers_of(passed, lambda v: (v[0].sin(), v[1]), passed)
    model = make(layers, loss=lambda output: output[0].square().mean(), chunks=2)
    for _ in range(2):
        model.step((rows(4), thing))
        for _, found in (model.output, model.forward((rows(4), thing))):
            assert torch.equal(found.x, thing.x)
            assert found is thing, "a copy"


@promise("One tensor in two places is one tensor for each layer, and comes out as one.", modes=True)
def one_tensor_in_two_places(make):
    def look(value):
        return value["a"][0], value["b"], value["a"][0] is value["b"]

    layers = layers_of(nn.Linear(3, 3), Partial(lambda x: {"a": [x], "b": x}), Partial(look))
    model = assert_as_plain(make, layers, rows(4))
    output = model.output
    assert output[0] is output[1]
    assert model.output[2] is True
