"""Values of any structure: into the model, between its layers, and out of it.

The reference is the plain module, run on the micro-batches one after another.
"""

import copy
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import (
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

from torchgpipe import GPipe, NoChunk

MODES = ["never", "except_last", "always"]
CHUNKS = [1, 2, 3]

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Registered:
    x: Tensor
    mask: Tensor | None
    scale: float = 2.0


torch.export.register_dataclass(Registered)


@dataclass
class Unregistered:
    x: Tensor


class Custom:
    """Known to PyTorch, with what is no child besides."""

    def __init__(self, children, label):
        self.children, self.label = children, label


register_pytree_node(
    Custom, lambda c: (c.children, c.label), lambda children, label: Custom(list(children), label)
)


class DictOfTensors(dict):
    pass


class ListOfTensors(list):
    pass


class Apply(nn.Module):
    """A function as a layer, with a weight to train."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, *args, **kwargs):
        return scaled(self.function(*args, **kwargs), self.weight)


def scaled(value, weight):
    return tree_map_only(Tensor, lambda x: x * weight if x.is_floating_point() else x, value)


def passed(value):
    return value


def model(*layers, balance=None, chunks=2, mode="always"):
    layers = [layer if isinstance(layer, nn.Module) else Apply(layer) for layer in layers]
    balance = balance or [1] * len(layers)
    return GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint=mode,
    )


def is_whole(leaf):
    return isinstance(leaf, NoChunk)


def scattered(value, chunks):
    """The micro-batches of a value, made without the library."""
    leaves, spec = tree_flatten(value, is_whole)
    (rows,) = {len(x) for x in leaves if isinstance(x, Tensor) and x.dim()} or {1}
    parts = max(1, min(rows, chunks))
    return [
        tree_unflatten(
            [
                x.value
                if is_whole(x)
                else x.tensor_split(parts)[i]
                if isinstance(x, Tensor) and x.dim()
                else x
                for x in leaves
            ],
            spec,
        )
        for i in range(parts)
    ]


def gathered(values):
    def join(*leaves):
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        if not leaves[0].dim():
            return torch.stack(leaves)
        return torch.cat(leaves) if len(leaves) > 1 else leaves[0]

    return tree_map(join, *values)


def reference(layers, args, kwargs, chunks):
    """What the plain layers give for the micro-batches, one after another."""
    outputs = []
    first, *rest = layers
    for some, named in scattered((args, kwargs), chunks):
        value = first(*some, **named)
        for layer in rest:
            value = layer(value)
        outputs.append(value)
    return gathered(outputs)


def loss_of(output):
    wanted = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return sum((k + 1) * x.abs().square().sum() for k, x in enumerate(wanted))


def gradients(output, leaves):
    loss = loss_of(output)
    if not isinstance(loss, Tensor):
        return [None] * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def leaves_of(value):
    """The tensors of an input that may have a gradient."""
    return [
        x
        for x in tree_leaves(tree_map_only(NoChunk, lambda x: x.value, value, is_leaf=is_whole))
        if isinstance(x, Tensor) and x.requires_grad
    ]


def verify_same(found, expected):
    """The same containers, tensors and other objects."""
    leaves, spec = tree_flatten(found)
    others, other_spec = tree_flatten(expected)
    assert spec == other_spec
    for a, b in zip(leaves, others):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert torch.equal(a, b)
            assert (a.dtype, a.requires_grad) == (b.dtype, b.requires_grad)
            assert a.stride() == b.stride()
        else:
            assert a == b


def verify(wrapped, *args, steps=1, **kwargs):
    """Asserts that a wrapper gives what its layers give without it, and the same gradients."""
    plain = copy.deepcopy(wrapped.module)
    for _ in range(steps):
        expected = reference(plain, args, kwargs, wrapped.chunks)
        output = wrapped(*args, **kwargs)
        verify_same(output, expected)
        expected, found = (
            gradients(value, leaves_of((args, kwargs, [*module.parameters()])))
            for value, module in ((expected, plain), (output, wrapped))
        )
        for a, b in zip(found, expected):
            assert (a is None) == (b is None)
            torch.testing.assert_close(a, b)
    return output


def rows(n=5, width=3, requires_grad=True):
    return torch.rand(n, width, requires_grad=requires_grad)


def integers(n=5):
    return torch.arange(n)


#: One value of each sort, with a tensor of rows in it.
VALUES = {
    "tuple": lambda: (rows(), integers()),
    "list": lambda: [rows(), integers()],
    "dict": lambda: {"x": rows(), "mask": integers() > 2},
    "ordered dict": lambda: OrderedDict(b=rows(), a=integers()),
    "default dict": lambda: defaultdict(list, x=rows()),
    "named tuple": lambda: Point(rows(), integers()),
    "structseq": lambda: rows().max(dim=1),
    "registered dataclass": lambda: Registered(rows(), integers() > 1),
    "a dataclass with None": lambda: Registered(rows(), None, scale=3.0),
    "custom": lambda: Custom([rows(), integers()], "label"),
    "None": lambda: (None, rows(), None),
    "ints, floats and flags": lambda: (1, rows(), 2.5, True),
    "strings": lambda: {"name": "x", "x": rows()},
    "others": lambda: (rows(), torch.float16, torch.device("cpu"), slice(2), int),
    "0-dim": lambda: (rows(), torch.tensor(2.0, requires_grad=True), torch.tensor(3)),
    "NoChunk": lambda: (rows(), NoChunk(rows(7)), NoChunk(integers(2))),
    "NoChunk of a structure": lambda: [rows(), NoChunk({"a": rows(1), "b": (rows(2), None, 3)})],
    "NoChunk of no tensor": lambda: [rows(), NoChunk(None), NoChunk("a")],
    "empty containers": lambda: (rows(), (), [], {}),
    "deep": lambda: {"a": [(rows(), Point({"b": rows()}, [integers()])), None], "c": ((rows(),),)},
    "alone in a tuple": lambda: (rows(),),
    "alone": rows,
    "integers alone": integers,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VALUES)
def test_values(name, mode):
    """In, between layers, and out."""
    for chunks in CHUNKS:
        verify(model(passed, passed, passed, chunks=chunks, mode=mode), VALUES[name]())


@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_between_layers(mode):
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))

        def forward(self, n=2):
            return self.weight * n

    for nothing in (lambda x: None, lambda x: 3, lambda x: {"a": ["b"]}):
        forget = Partial(lambda n: 3)
        verify(model(passed, Partial(nothing), forget, Made(), mode=mode), rows())
    assert torch.equal(model(wrapped := Made(), chunks=1, mode=mode)(), wrapped.weight * 2)


def test_containers_that_come_out():
    value = {
        "list": [integers()],
        "tuple": (integers(),),
        "ordered": OrderedDict(b=integers(), a=1),
        "point": Point(integers(), None),
        "data": Registered(integers(), None),
        "custom": Custom([integers()], "label"),
        "default": defaultdict(list, x=integers()),
    }
    output = model(passed, passed)(value)
    assert [*map(type, output.values())] == [*map(type, value.values())]
    assert list(output) == list(value)
    assert list(output["ordered"]) == ["b", "a"]
    assert output["custom"].label == "label"
    assert output["default"].default_factory is list


# What the first layer is called with.


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x, mask=None, *more, scale=1.0, bias=None):
        x = x * self.weight * scale
        if mask is not None:
            x = x.masked_fill(mask[:, None], 0)
        if bias is not None:
            x = x + bias["bias"]
        return sum(more, x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ([rows()], {}),
        ([rows(), integers() > 1], {}),
        ([rows(), None, rows(), rows()], {}),
        ([rows()], {"mask": integers() > 1, "scale": 2.0}),
        ([rows()], {"scale": torch.tensor(2.0), "bias": {"bias": rows()}}),
        ([rows()], {"bias": {"bias": NoChunk(rows(1))}}),
        ([], {"x": rows(), "mask": integers() > 1}),
        ([], {"x": rows()}),
    ],
)
def test_arguments(args, kwargs, mode):
    for balance in ([1, 1], [2]):
        verify(model(Attention(), passed, balance=balance, mode=mode), *args, **kwargs)


def test_input_by_the_name_that_a_sequential_gives_it():
    x = rows()
    wrapped = model(Attention(), passed)
    expected = wrapped.module(input=x)
    torch.testing.assert_close(wrapped(input=x), expected)

    class Named(nn.Module):
        def forward(self, input, scale):
            return input * scale

    assert torch.equal(model(Named())(input=x, scale=2), x * 2)


def test_a_tuple_is_one_argument():
    x, y = rows(), rows()
    swapped = model(lambda value: (value[1], value[0]))((x, y))
    assert torch.equal(swapped[0], y * 1.5)


def test_wrong_arguments_are_the_layers_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        model(Attention())(rows(), other=1)


# Splitting.


def test_what_a_layer_sees():
    seen = []

    class Look(nn.Module):
        def forward(self, *args, **kwargs):
            seen.append((args, kwargs))
            return args[0]

    whole, scalar, thing = torch.rand(7, 2), torch.tensor(1.0), object()
    model(Look(), chunks=2, mode="never")(
        torch.arange(3), scalar, thing, None, whole=NoChunk(whole), nested=[NoChunk({"a": whole})]
    )
    assert [args[0].tolist() for args, _ in seen] == [[0, 1], [2]]
    for args, kwargs in seen:
        assert torch.equal(args[1], scalar)
        assert args[2] is thing
        assert args[3] is None
        assert torch.equal(kwargs["whole"], whole)
        assert torch.equal(kwargs["nested"][0]["a"], whole)


@pytest.mark.parametrize("mode", MODES)
def test_layers_may_change_containers(mode):
    """Each run is given its own."""

    def change(value):
        value["x"] = value.pop("y") + value.pop("z")[0].tanh()
        return value

    value = {"x": rows(), "y": rows(), "z": [rows()]}
    wrapped = model(passed, change, mode=mode)
    expected = (value["y"] * 1.5 + (value["z"][0] * 1.5).tanh()) * 1.5
    output = wrapped(value)
    torch.testing.assert_close(output["x"], expected)
    expected.sum().backward()
    gradients = [value[key].grad.clone() if key == "y" else None for key in value]
    value["y"].grad = None
    output["x"].sum().backward()
    torch.testing.assert_close(value["y"].grad, gradients[1])
    assert set(value) == {"x", "y", "z"}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_gradient_of_what_is_not_split(mode, chunks):
    whole = torch.rand(3, 3, requires_grad=True)
    scale = torch.tensor(2.0, requires_grad=True)
    x = rows()
    wrapped = model(
        lambda v: (v[0] @ v[1] * v[2], v[1]), lambda v: v[0].sin() @ v[1], chunks=chunks
    )
    wrapped.checkpoint = mode
    wrapped((x, NoChunk(whole), scale)).square().sum().backward()
    found = [t.grad for t in (x, whole, scale)]
    w, v = (p.detach() for p in wrapped.parameters())
    expected = ((x @ whole * scale * w).sin() @ (whole * w) * v).square().sum()
    for a, b in zip(found, torch.autograd.grad(expected, (x, whole, scale))):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_one_tensor_split_and_whole(mode, chunks):
    """As self-attention over a whole that is a batch, too."""
    x = rows()
    attend = lambda v: (v[0] @ v[1].t()).softmax(-1) @ v[1]  # noqa: E731
    verify(model(attend, passed, chunks=chunks, mode=mode), (x, NoChunk(x)))
    verify(model(passed, attend, passed, chunks=chunks, mode=mode), [x, NoChunk(x), x])


def test_different_numbers_of_rows_are_an_error():
    with pytest.raises(ValueError, match=r"kwargs\['mask'\]\": \(4,\).*torchgpipe.NoChunk"):
        model(Attention())(rows(5), mask=torch.zeros(4).bool())
    with pytest.raises(ValueError, match=r"\['x'\]\[1\]\": \(4, 3\)"):
        model(passed)({"x": [rows(5), rows(4)]})


def test_containers_without_names():
    """Those of a class that was registered without them are counted."""
    with pytest.raises(ValueError, match=r"'leaf 0': \(5, 3\), 'leaf 1': \(4, 3\)"):
        model(passed)(Custom([rows(5), rows(4)], "label"))
    with pytest.raises(ValueError, match="output: leaf 1, micro-batch 0: 3, micro-batch 1: 2"):
        model(Partial(lambda x: Custom([x, len(x)], "label")))(rows())
    with pytest.raises(ValueError, match="same structure"):
        model(Partial(lambda x: Custom([x], len(x))))(rows())


def test_one_tensor_in_several_places_comes_out_as_one():
    a, b = model(Partial(lambda x: {"a": [x], "b": x}), Partial(lambda v: (v["a"][0], v["b"])))(
        rows()
    )
    assert a is b


@pytest.mark.parametrize(
    "make",
    [lambda x: x.to_sparse(), lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged)],
    ids=["sparse", "nested"],
)
def test_what_is_not_dense_is_not_split(make):
    x = make(rows(4))
    with pytest.raises(ValueError, match="only dense tensors.*the value, layout: .*NoChunk"):
        model(passed)(x)
    output, size = model(Partial(lambda x: [x, x.shape[0]]), chunks=1)(x)
    assert (output.layout, size) == (x.layout, x.shape[0])


def test_nothing_to_split():
    with pytest.raises(ValueError, match="must be an input tensor to split.*chunks: 2"):
        model(passed)({"x": torch.tensor(1.0), "n": 3})
    assert verify(model(passed, chunks=1), {"x": torch.tensor(1.0), "n": 3})["x"].shape == (1,)


# Joining.


@pytest.mark.parametrize("mode", MODES)
def test_losses_are_stacked(mode):
    output = verify(
        model(passed, lambda x: {"loss": x.square().mean(), "n": x.argmax(), "x": x}, mode=mode),
        rows(),
    )
    assert (output["loss"].shape, output["n"].shape, output["x"].shape) == ((2,), (2,), (5, 3))
    assert output["n"].dtype == torch.int64


def test_one_micro_batch_is_stacked_like_many():
    assert model(lambda x: x.sum(), chunks=1)(rows()).shape == (1,)


@pytest.mark.parametrize(
    ("function", "name", "a", "b"),
    [
        (lambda x: (x, len(x)), r"\[1\]", "3", "2"),
        (lambda x: {"x": x, "n": [None, str(len(x))]}, r"\['n'\]\[1\]", "'3'", "'2'"),
        (lambda x: Point(x, len(x) > 2), "y", "True", "False"),
        (lambda x: len(x), "the value", "3", "2"),
    ],
)
def test_other_outputs_that_differ_are_an_error(function, name, a, b):
    wrapped = model(passed, Partial(function))
    with pytest.raises(
        ValueError, match=rf"equal for all .*output: {name}, micro-batch 0: {a}, micro-batch 1: {b}"
    ):
        wrapped(rows())


class Partial(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x,) * len(x), "same structure.*micro-batch 0: .*Tensor.*micro-batch 1: "),
        (lambda x: (x, x if len(x) > 2 else None), "same structure.*NoneType"),
        (lambda x: {str(len(x)): x}, r"same structure.*'3'.*'2'"),
        (lambda x: x.t(), r"same shape but for dimension 0.*\(3, 3\), \(3, 2\)"),
        (lambda x: x if len(x) > 2 else x.sum(), "same shape but for dimension 0"),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error(function, message):
    with pytest.raises(ValueError, match=message):
        model(passed, function)(rows())


def test_other_outputs_alone():
    assert model(passed, Partial(lambda x: None))(rows()) is None
    assert model(passed, Partial(lambda x: {"a": "b"}))(rows()) == {"a": "b"}


# What holds tensors and is no known container.

UNKNOWN = {
    "a dataclass": Unregistered,
    "in a list": lambda x: [x, Unregistered(x)],
    "in a registered one": lambda x: Registered(x, Unregistered(x)),
    "around others": lambda x: Unregistered([{"a": x}]),
    "in NoChunk": lambda x: [x, NoChunk(Unregistered(x))],
    "deep in NoChunk": lambda x: [x, NoChunk({"a": (Unregistered(x),)})],
}
REGISTER = r"class: Unregistered.*torch\.export\.register_dataclass\(Unregistered\)"


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("name", UNKNOWN)
def test_unregistered_dataclass_is_an_error(name, chunks):
    wrapped = model(passed, passed, chunks=chunks)
    with pytest.raises(TypeError, match=REGISTER):
        wrapped(UNKNOWN[name](rows()))
    with pytest.raises(TypeError, match=REGISTER):
        wrapped(rows(), other=UNKNOWN[name](rows()))


@pytest.mark.parametrize("j", [0, 1])
@pytest.mark.parametrize("name", [name for name in UNKNOWN if "NoChunk" not in name])
def test_unregistered_dataclass_of_a_layer_is_an_error(name, j):
    layers = [passed, passed]
    layers[j] = Partial(UNKNOWN[name])
    with pytest.raises(TypeError, match=REGISTER):
        model(*layers)(rows())


def test_unregistered_dataclass_without_tensors_is_a_value():
    output = model(passed)((rows(), Unregistered(3)))
    assert output[1] == Unregistered(3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: DictOfTensors(a=x), "DictOfTensors"),
        (lambda x: ListOfTensors([x]), "ListOfTensors"),
        (lambda x: {"a": [ListOfTensors([1, [x]])]}, "ListOfTensors"),
        (lambda x: (x, {x}), "set"),
        (lambda x: [x, NoChunk(DictOfTensors(a=x))], "DictOfTensors"),
    ],
)
def test_subclasses_of_containers_are_an_error(make, name):
    with pytest.raises(TypeError, match=rf"class: {name}.*register_pytree_node\({name}, \.\.\.\)"):
        model(passed)(make(rows()))
    if name != "set":
        with pytest.raises(TypeError, match=rf"class: {name}"):
            model(Partial(lambda x: tree_map_only(NoChunk, lambda n: n.value, make(x))))(rows())


def test_subclasses_of_containers_without_tensors_are_values():
    output = model(passed)((rows(), DictOfTensors(a=1), ListOfTensors([2])))
    assert output[1:] == ({"a": 1}, [2])


def test_what_holds_itself():
    held = ListOfTensors()
    held.append(held)
    x = rows()
    assert model(passed)((x, held))[1] is held
    held.append(x)
    with pytest.raises(TypeError, match="class: ListOfTensors"):
        model(passed)((x, held))


@pytest.mark.parametrize("j", [0, 1])
def test_no_chunk_from_a_layer_is_an_error(j):
    layers = [passed, passed]
    layers[j] = Partial(lambda x: (x, [NoChunk(x)]))
    with pytest.raises(
        TypeError, match=r"in the input.*of: Tensor\); have layers return the value"
    ):
        model(*layers)(rows())


def test_no_chunk_in_no_chunk_is_an_error():
    with pytest.raises(TypeError, match="belongs in the input"):
        model(passed)((rows(), NoChunk(NoChunk(rows()))))


# What is not differentiable.


class Mixed(nn.Module):
    """Tensors that have no gradient before, between and behind those that have."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        x = x * self.weight
        value = {
            "integers": (x * 10).long(),
            "flags": x > 0.3,
            "detached": x.detach(),
            "complex": torch.complex(x, x),
            "half": x.half(),
            "bytes": (x * 10).byte(),
            "x": x.sin(),
            "y": x.cos(),
            "count": torch.tensor(3),
        }
        return [value[name] for name in self.order]


class Unmixed(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.order = order
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, values):
        value = dict(zip(self.order, values))
        y = self.weight * 0.5
        for name in self.order:
            x = value[name]
            y = y + (x.abs() if x.is_complex() else x).to(y.dtype).tanh() * self.weight
        return y, value[self.order[0]]


ORDERS = [
    ["integers", "x"],
    ["x", "integers"],
    ["flags", "x", "integers", "y", "detached"],
    ["count", "bytes", "complex", "half", "x"],
    ["integers", "flags"],
    ["detached", "count"],
    ["y", "integers", "x"],
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_tensors_without_a_gradient(order, mode):
    for requires_grad in (False, True):
        verify(
            model(Mixed(order), Partial(passed), Unmixed(order), chunks=3, mode=mode),
            rows(requires_grad=requires_grad),
        )


# Shapes.


@pytest.mark.parametrize("mode", MODES)
def test_shapes_from_step_to_step(mode):
    wrapped = model(nn.Linear(3, 3), torch.tanh, lambda x: x.cumsum(1), chunks=3, mode=mode)
    for shape in [(6, 4, 3), (6, 7, 3), (2, 1, 3), (1, 5, 3), (7, 2, 3), (4, 2, 2, 3)]:
        verify(wrapped, torch.rand(shape, requires_grad=True))
    value = {"x": torch.rand(4, 3), "n": [torch.rand(4)]}
    verify(model(passed, passed, mode=mode), value)


@pytest.mark.parametrize("mode", MODES)
def test_shapes_from_micro_batch_to_micro_batch(mode):
    """Each is cut to its own longest sequence."""

    def cut(value):
        x, lengths = value
        n = int(lengths.max())
        return {"x": x[:, :n], "mask": torch.arange(n) < lengths[:, None], "n": n}

    def pooled(value):
        return (value["x"].tanh() * value["mask"][..., None]).sum(1) / value["n"]

    x = torch.rand(6, 5, 3, requires_grad=True)
    lengths = torch.tensor([1, 2, 5, 3, 1, 0])
    verify(model(cut, passed, pooled, chunks=3, mode=mode), (x, lengths), steps=2)


@pytest.mark.parametrize("mode", MODES)
def test_structures_from_micro_batch_to_micro_batch(mode):
    """They may differ between layers, if not at the end."""

    def differ(x):
        return x if len(x) > 1 else [x.sin(), {"y": x.cos()}, integers(len(x))]

    def same(value):
        return value if isinstance(value, Tensor) else value[0] * value[1]["y"]

    verify(model(differ, passed, same, chunks=3, mode=mode), rows(4))


@pytest.mark.parametrize("mode", MODES)
def test_empty_mini_batches(mode):
    value = {"x": torch.rand(0, 3, requires_grad=True), "n": [integers(0)], "w": NoChunk(rows(2))}
    for chunks in CHUNKS:
        output = verify(model(passed, passed, chunks=chunks, mode=mode), value)
        assert output["x"].shape == (0, 3)


def test_no_rows_but_values():
    verify(model(nn.Linear(3, 2), lambda x: {"loss": x.sum(), "x": x}), torch.rand(0, 3))


# What outputs are like.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [[], [0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_requires_grad(frozen, mode):
    for requires_grad in (False, True):
        layers = [nn.Linear(3, 3), Partial(lambda x: (x, x > 0, x.detach())), nn.Linear(3, 3)]
        layers[2] = First(layers[2])
        for k in frozen:
            layers[k].requires_grad_(False)
        wrapped = model(*layers, mode=mode)
        output = verify(wrapped, rows(requires_grad=requires_grad))
        expected = len(set(frozen) & {0, 2}) < 2 or requires_grad
        assert [x.requires_grad for x in output] == [expected, False, False]


class First(nn.Module):
    """A layer for the first of several."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        first, *rest = value
        return (self.layer(first), *rest)


@pytest.mark.parametrize("mode", MODES)
def test_integer_outputs(mode):
    wrapped = model(nn.Linear(3, 3), Partial(lambda x: x.argmax(-1)), mode=mode)
    output = verify(wrapped, rows())
    assert (output.dtype, output.requires_grad) == (torch.int64, False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.uint8, torch.bool]
)
def test_dtypes(dtype, mode):
    x = torch.ones(4, 2).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        x.requires_grad_()
    output = verify(model(Partial(lambda x: [x]), Partial(lambda x: x[0]), mode=mode), x)
    assert (output.dtype, output.requires_grad) == (dtype, x.requires_grad)


#: Strides other than those of a new tensor.
FORMATS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 2),
    "transposed twice": lambda x: x.permute(0, 3, 2, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "strided": lambda x: x[:, ::2, :, 1:],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
def test_memory_formats(name, mode):
    x = torch.rand(4, 2, 3, 5, requires_grad=True)
    for chunks in (1, 2):
        for layers in (
            [FORMATS[name], passed],
            [passed, Partial(FORMATS[name])],
            [Partial(FORMATS[name]), Partial(passed), torch.sin],
        ):
            verify(model(*layers, chunks=chunks, mode=mode), x)


def test_channels_last_through_convolutions():
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1))
    wrapped = model(*module.to(memory_format=torch.channels_last))
    x = torch.rand(4, 2, 6, 6).to(memory_format=torch.channels_last)
    output = verify(wrapped, x)
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_classes_that_are_no_containers():
    """What is in them is nobody's business but the layers'."""
    thing = SimpleNamespace(x=torch.rand(2))
    output = model(passed)((rows(), thing))
    assert output[1] is thing


# Any structure.


class Scale(nn.Module):
    """Maps over the tensors, in another way for each sort."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, value):
        def scale(x):
            return (x * self.weight).sin() if x.is_floating_point() else x + 1

        return tree_map_only(Tensor, scale, value)


class Nest(nn.Module):
    """Puts what it is given deeper, beside what it makes of it."""

    def forward(self, value):
        found = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim()]
        x = found[-1]
        return {"b": [value, x.double().tanh().sum()], "a": Point(x.argmax(), (None, 7, "seven"))}


class Stop(nn.Module):
    def forward(self, value):
        tensors = iter(range(len(tree_leaves(value))))
        return tree_map_only(Tensor, lambda x: x.detach() if next(tensors) % 2 else x, value)


class Reverse(nn.Module):
    """Of lists and tuples."""

    def forward(self, value):
        return value[::-1] if type(value) in (list, tuple) else [value, value]


LAYERS = {"scale": Scale, "nest": Nest, "stop": Stop, "reverse": Reverse, "nothing": nn.Identity}


def tensors_of(n):
    """Makers of leaves, for mini-batches of n rows."""
    return st.sampled_from(
        [
            lambda: torch.rand(n, 2, requires_grad=True),
            lambda: torch.rand(n),
            lambda: torch.rand(n, 1, 2, dtype=torch.float64, requires_grad=True),
            lambda: torch.arange(n),
            lambda: torch.tensor(0.5, requires_grad=True),
            lambda: torch.tensor(3),
            lambda: NoChunk(torch.rand(3, 2, requires_grad=True)),
            lambda: NoChunk([torch.arange(2), None]),
            lambda: None,
            lambda: 3,
            lambda: "three",
        ]
    )


def containers(children):
    some = st.lists(children, max_size=3)
    keys = st.sampled_from("xyz")
    return st.one_of(
        some,
        some.map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=2).map(OrderedDict),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.tuples(children, children).map(lambda pair: Registered(*pair, scale=lambda: 2.0)),
        some.map(lambda children: Custom(children, "label")),
    )


@st.composite
def cases(draw):
    """A value with rows, and layers with their balance."""
    n = draw(st.integers(1, 5))
    tree = draw(st.recursive(tensors_of(n), containers, max_leaves=6))
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=4))
    layers = [LAYERS[name]() for name in ["scale", *names, "scale"]]
    cuts = draw(st.sets(st.integers(1, len(layers) - 1)))
    balance = [b - a for a, b in pairwise([0, *sorted(cuts), len(layers)])]
    value = tree_map(lambda make: make(), (tree, lambda: torch.rand(n, 2)))
    return value, layers, balance


@settings(max_examples=50)
@given(cases(), st.integers(1, 4), st.sampled_from(MODES))
def test_any_structure(case, chunks, mode):
    value, layers, balance = case
    torch.manual_seed(0)
    verify(model(*layers, balance=balance, chunks=chunks, mode=mode), value)
