"""Values, losses and gradients."""

from collections import OrderedDict, defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import register_pytree_node

from tests.contract.comparing import assert_as_plain
from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step
from tests.support.structures import (
    Apply,
    Custom,
    Partial,
    Point,
    Registered,
    integers,
    passed,
    rows,
    summed,
)
from torchgpipe import NoChunk, PerMicroBatch, arguments
from torchgpipe.partition.split import Sequential


def batch(rows, model, size=6):
    """An input and a target."""
    x, y = torch.rand(2, rows, size)
    return x, y, x.to(model.first), y.to(model.last)


def layers_of(*found):
    """Layers, each of them a module, or a function that gets a weight."""
    return Sequential(*[x if isinstance(x, nn.Module) else Apply(x) for x in found])


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
    "Nested values of any structure (lists, tuples, dicts, named tuples, dataclasses, registered "
    "classes) pass into the model, between its layers, and out of it.",
    modes=True,
)
def containers(make):
    checked_values(make, [*VALUES][:10])


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


SHARES = Otherwise(
    "a graph does not see changes in place, so a stage is eager, with a warning",
    "tensors that come to it share memory",
)


@promise(
    "One tensor may be in an input twice, once to be split and once whole.",
    modes=True,
    otherwise={"ScheduledLoss of graphs": SHARES},
)
def split_and_whole(make):
    both = rows(6)
    layers = layers_of(lambda v: v[0] @ v[1].t() @ v[1], passed)
    assert_as_plain(make, layers, (both, NoChunk(both)), chunks=3)


@promise(
    "Outputs without a dimension, as losses, are stacked, one for each micro-batch, and so is what "
    "PerMicroBatch marks, whichever layer returned it; the mark does not come out.",
    modes=True,
)
def one_for_each_micro_batch(make):
    def marked(x):
        found = {"mean": x.mean(0), "m": x.T @ x, "s": x.sum(), "nothing": None}
        return {"x": x.sin(), "m": PerMicroBatch(found), "loss": x.square().mean()}

    layers = layers_of(passed, Partial(marked), Partial(lambda v: v | {"x": v["x"] + 1}))
    for chunks in make.some((2, 1, 3)):
        model = assert_as_plain(make, layers, rows(6), chunks=chunks)
        found = {name: x.shape for name, x in model.output["m"].items() if x is not None}
        assert found == {"mean": (chunks, 3), "m": (chunks, 3, 3), "s": (chunks,)}
        assert model.output["loss"].shape == (chunks,)


@promise(
    "There may be several rows, or none, in an output for each row of the input; they are joined.",
    modes=True,
)
def several_rows_for_each(make):
    for k in make.some((0, 3)):
        repeat = Partial(lambda x, k=k: (x, x.detach().repeat_interleave(k, 0)))
        model = assert_as_plain(
            make, layers_of(passed, repeat), rows(7), loss=lambda y: y[0].square().mean()
        )
        assert model.output[1].shape == (7 * k, 3)


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


@promise(
    "Layers may change the containers that they get: each run has its own.",
    otherwise={
        "MappedGPipe": Otherwise(
            "a module of a map gets a copy of its arguments, and what it changes in there would "
            "be lost: an error says so",
            "must not change a list or dict that it is called with",
        )
    },
)
def changed_containers(make):
    def change(value):
        value["x"] = value.pop("y") + value.pop("z")[0].tanh()
        return value

    value = {"x": integers(4), "y": rows(4), "z": [rows(4)]}
    for layers in (layers_of(passed, change, passed), layers_of(change, passed)):
        model = assert_as_plain(make, layers, value, mode="always")
        model.step(value)
        assert set(value) == {"x", "y", "z"}


@promise("Shapes may change from step to step, rows and other dimensions.", modes=True)
def shapes_of_steps(make):
    layers = layers_of(nn.Linear(3, 3), nn.Tanh(), lambda x: x.cumsum(1))
    model = make(layers, chunks=3, loss=mean_of_squares)
    for shape in make.some([(6, 4, 3), (6, 7, 3), (2, 1, 3), (1, 5, 3), (4, 2, 2, 3)]):
        x = torch.rand(shape)
        expected = plain_step(layers, x, loss=mean_of_squares)
        torch.testing.assert_close(model.step(x), expected)
    assert_same_grads(model, layers)


def mean_of_squares(output):
    return output.square().mean()


def cut(value):
    """Cut sequences to the longest of the micro-batch."""
    x, lengths = value
    n = int(lengths.max())
    return {"x": x[:, :n], "mask": torch.arange(n) < lengths[:, None], "n": n}


def pooled(value):
    return (value["x"].tanh() * value["mask"][..., None]).sum(1) / value["n"]


ANNOUNCED = (
    "a form is announced to the other process once, for all micro-batches of as many rows; what "
    "differs is an error that shows both"
)


@promise(
    "Between layers, shapes may differ from micro-batch to micro-batch, as where each is cut to "
    "its own longest sequence.",
    modes=True,
    otherwise={
        "ScheduledLoss of graphs": Otherwise(
            "a graph knows no values of tensors, so a stage that asks for one is eager, with a "
            "warning",
            "its code depends on the values of tensors",
        ),
        "Pipe": Otherwise(ANNOUNCED, "must have the same structure and shapes"),
    },
)
def shapes_of_micro_batches(make):
    lengths = torch.tensor([1, 2, 5, 3, 1, 0])
    assert_as_plain(make, layers_of(cut, passed, pooled), (torch.rand(6, 5, 3), lengths), chunks=3)


def differ(x):
    return x if len(x) > 1 else [x.sin(), {"y": x.cos()}, integers(len(x))]


def alike(value):
    return value if isinstance(value, torch.Tensor) else value[0] * value[1]["y"]


@promise(
    "Between layers, structures may differ from micro-batch to micro-batch with their rows.",
    modes=True,
)
def structures_of_micro_batches(make):
    assert_as_plain(make, layers_of(differ, passed, alike), rows(4), chunks=3)


#: Tensors that a layer returns, some of them without a gradient, in the order of the names.
TENSORS = {
    "integers": lambda x: (x * 10).long(),
    "flags": lambda x: x > 0.3,
    "detached": lambda x: x.detach(),
    "complex": lambda x: torch.complex(x, x),
    "half": lambda x: x.bfloat16(),
    "double": lambda x: x.double(),
    "bytes": lambda x: (x * 10).byte(),
    "x": torch.sin,
    "y": torch.cos,
    "count": lambda x: torch.tensor(3),
}

ORDERS = [
    ["integers", "x"],
    ["flags", "x", "integers", "y", "detached"],
    ["count", "bytes", "complex", "half", "double"],
    ["detached", "count", "integers"],
    ["y", "integers", "x"],
]


@promise(
    "Tensors of any type, with a gradient and without, stand in any order among what layers pass "
    "on, and among outputs; a loss may leave some of them out.",
    modes=True,
)
def of_any_type(make):
    def merged(values):
        return sum((x.abs() if x.is_complex() else x).float().tanh() for x in values), values[-1]

    for order in make.some(ORDERS):
        made = lambda x, order=order: [TENSORS[name](x) for name in order]  # noqa: E731
        assert_as_plain(make, layers_of(made, passed, merged), rows(4, requires_grad=False))
        layers = layers_of(nn.Linear(3, 3), lambda x, made=made: (x, *made(x)))
        assert_as_plain(make, layers, rows(4), loss=lambda output: output[0].square().mean())


#: Strides other than those of a new tensor.
FORMATS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2),
    "transposed twice": lambda x: x.permute(0, 3, 2, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "strided": lambda x: x[:, ::2, :, 1:],
}


@promise(
    "Channels-last, transposed, expanded and strided tensors may be inputs, and pass between "
    "layers.",
    modes=True,
)
def memory_formats(make):
    for change in make.some(FORMATS.values()):
        x = change(torch.rand(4, 2, 3, 5))
        assert_as_plain(make, layers_of(passed, Partial(change), torch.sin), x, steps=1)
    images = FORMATS["channels last"](torch.rand(4, 2, 6, 6))
    layers = layers_of(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.Flatten())
    assert_as_plain(make, layers.to(memory_format=torch.channels_last), images)


@promise("Inputs may be integers, as for an embedding, and outputs, too.", modes=True)
def embeddings(make):
    layers = layers_of(nn.Embedding(9, 3), nn.Linear(3, 9))
    words = torch.randint(9, (7, 5)), torch.randint(9, (7, 5))
    cross_entropy = lambda output, y: F.cross_entropy(output.flatten(0, 1), y.flatten())  # noqa: E731
    assert_as_plain(make, layers, *words, loss=cross_entropy)
    layers = layers_of(*layers, Partial(lambda x: (x, x.argmax(-1))))
    model = assert_as_plain(make, layers, *words, loss=lambda x, y: cross_entropy(x[0], y))
    assert model.output[1].dtype == torch.int64


@promise(
    "An input that requires a gradient gets it, all of the same, whether it is a leaf or has been "
    "computed; layers and loss may be in one input of several with and without.",
    modes=True,
)
def gradients_of_inputs(make):
    layers = layers_of(lambda v: v["a"].sin() * v["b"] + v["c"][0], nn.Linear(3, 3))
    value = {"a": rows(5), "b": rows(5, requires_grad=False), "c": (rows(5),)}
    assert_as_plain(make, layers, value)
    model, x = make(layers, loss=mean_of_squares, chunks=2), rows(5)
    for run in (lambda v: mean_of_squares(layers(v)).backward(), model.step):
        run(value | {"a": (x * 2).exp()})
    (found,) = model.input_grads([x])
    plain = torch.autograd.grad(mean_of_squares(layers(value | {"a": (x * 2).exp()})), x)[0]
    torch.testing.assert_close(found, 2 * plain)


@promise(
    "A mini-batch without rows, and tensors with an empty dimension, are values as all others.",
    modes=True,
)
def empty(make):
    def total(output):
        return output["x"].sum() / max(len(output["x"]), 1) + output["y"].sum()

    def split(x):
        return {"x": x.sin(), "y": x[:, :0], "n": integers(len(x))}

    def some(v):
        return v | {"y": v["y"] * 2, "x": v["x"] + v["y"].sum()}

    for count, chunks in make.some(((0, 2), (4, 2), (0, 1))):
        layers = layers_of(nn.Linear(3, 3), split, some)
        model = assert_as_plain(make, layers, rows(count), loss=total, chunks=chunks)
        assert model.output["y"].shape == (count, 0)


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


@promise(
    "What comes from a layer and goes nowhere gets no gradient: it stays None.",
    modes=True,
    otherwise={"Pipe": Otherwise("no gradient comes from another process as zeros", "^zeros")},
)
def unused(make):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x), self.other(x)

    layers = layers_of(Two(), lambda v: v[0].sin(), nn.Linear(3, 3))
    model = make(layers, loss=mean_of_squares, chunks=2)
    mean_of_squares(layers(x := rows(4))).backward()
    model.step(x)
    other = model.grads["0.other.weight"]
    assert other is None or not other.any()
    assert other is None, "zeros"
    assert_same_grads(model, layers)


@promise("One tensor in two places is one tensor for each layer, and comes out as one.", modes=True)
def one_tensor_in_two_places(make):
    def look(value):
        return value["a"][0], value["b"], value["a"][0] is value["b"]

    layers = layers_of(nn.Linear(3, 3), Partial(lambda x: {"a": [x], "b": x}), Partial(look))
    model = assert_as_plain(make, layers, rows(4))
    assert model.output[0] is model.output[1]
    assert model.output[2] is True
