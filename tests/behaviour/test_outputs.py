"""Outputs are those of the plain model: joined, of the same kind, with gradients."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests.support.helpers import MODES
from tests.support.structures import CHUNKS, Partial, Point, integers, model, passed, rows, verify
from torchgpipe import GPipe, NoChunk, PerMicroBatch

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


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x,) * len(x), "same structure.*micro-batch 0: .*Tensor.*micro-batch 1: "),
        (lambda x: (x, x if len(x) > 2 else None), "same structure.*NoneType"),
        (lambda x: {str(len(x)): x}, r"same structure.*'3'.*'2'"),
        (lambda x: x.t(), r"same multiple of the rows.*\(3, 3\), \(3, 2\)\], rows: \[3, 2\]"),
        (lambda x: x[:, : len(x)], r"same shape but for dimension 0.*\(3, 3\), \(2, 2\)"),
        (lambda x: x if len(x) > 2 else x.sum(), "same shape but for dimension 0"),
    ],
)
def test_outputs_that_cannot_be_joined_are_an_error(function, message):
    with pytest.raises(ValueError, match=message):
        model(passed, function)(rows())


def test_other_outputs_alone():
    assert model(passed, Partial(lambda x: None))(rows()) is None
    assert model(passed, Partial(lambda x: {"a": "b"}))(rows()) == {"a": "b"}


# Rows and what is none.


class Recurrent(nn.Module):
    """A layer that returns a function of the state of an LSTM, whose rows are in dimension 1."""

    def __init__(self, function):
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)
        self.function = function

    def forward(self, x):
        output, (h, c) = self.lstm(x)
        return output, self.function(h), c.transpose(0, 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [4, 5, 6])
def test_rows_in_another_dimension_are_an_error(count, mode):
    x = torch.rand(count, 4, 3)
    wrapped = model(nn.Identity(), Recurrent(lambda h: h), chunks=2, mode=mode)
    with pytest.raises(
        ValueError, match=r"same multiple of the rows.*output: \[1\], shapes: \[\(1"
    ):
        wrapped(x)
    wrapped = model(nn.Identity(), Recurrent(lambda h: h.transpose(0, 1)), chunks=2, mode=mode)
    assert verify(wrapped, x)[1].shape == (count, 1, 2)


@pytest.mark.parametrize("count", [4, 6, 7, 9])
def test_matrix_that_has_no_rows_is_an_error(count):
    wrapped = model(nn.Linear(3, 5), lambda x: {"x": x, "m": x.T @ x}, chunks=2)
    with pytest.raises(ValueError, match=r"output: \['m'\], shapes: \[\(5, 5\), \(5, 5\)\]"):
        wrapped(torch.rand(count, 3))


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_several_rows_for_each(mode, chunks):
    """Beam search returns several rows for each, and a filter may return none at all."""
    for k in (0, 1, 3):
        function = Partial(lambda x, k=k: (x, x.repeat_interleave(k, 0)))
        wrapped = model(passed, function, chunks=chunks, mode=mode)
        assert verify(wrapped, rows(7))[1].shape == (7 * k, 3)


def test_fewer_rows_are_an_error_unless_stacked():
    """Pairs of rows are whole only where each micro-batch has an even number of them."""
    x = rows(8)
    with pytest.raises(ValueError, match=r"shapes: \[\(2, 3\), \(2, 3\)\], rows: \[4, 4\]"):
        model(passed, lambda x: x[::2] * x[1::2], chunks=2)(x)
    output = model(lambda x: PerMicroBatch(x[::2] * x[1::2]), chunks=2)(x)
    assert output.shape == (2, 2, 3)


@pytest.mark.parametrize("count", [4, 5, 3, 2, 1])
def test_losses_with_a_dimension_are_joined(count):
    """Losses had to have a dimension of size 1 in torchgpipe 0.0.7."""
    for shape in [(1,), (1, 1)]:
        loss = Partial(lambda x, shape=shape: x.square().sum().view(shape))
        output = verify(model(passed, loss), rows(count))
        assert output.shape == (min(count, 2), *shape[1:])


def test_one_row_for_each_micro_batch_tells_nothing():
    """Five rows for each row, or a matrix: nobody knows. One chunk has nothing to join."""
    assert model(nn.Linear(3, 5), lambda x: x.T @ x, chunks=2)(rows(2)).shape == (10, 5)
    assert model(nn.Linear(3, 5), lambda x: x.T @ x, chunks=1)(rows(4)).shape == (5, 5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_one_for_each_micro_batch(chunks, mode):
    """Stacked, wherever the mark is, and whichever layer returned it."""

    def marked(x):
        return {"x": x.sin(), "m": PerMicroBatch({"mean": x.mean(0), "m": x.T @ x, "s": x.sum()})}

    def add(v):
        return v | {"x": v["x"] + 1}

    wrapped = model(passed, Partial(marked), Partial(add), chunks=chunks, mode=mode)
    output = verify(wrapped, rows(6))
    assert output["x"].shape == (6, 3)
    shapes = {name: tuple(x.shape) for name, x in output["m"].items()}
    assert shapes == {"mean": (chunks, 3), "m": (chunks, 3, 3), "s": (chunks,)}


def test_one_tensor_marked_and_not():
    x, stacked = model(lambda x: (x, PerMicroBatch(x)), chunks=2)(rows(4))
    assert (x.shape, stacked.shape) == ((4, 3), (2, 2, 3))


def test_marks_do_not_come_out():
    nothing, (stacked,) = model(
        lambda x: (PerMicroBatch(None), PerMicroBatch([PerMicroBatch(x.T @ x)])), chunks=2
    )(rows(4))
    assert nothing is None
    assert stacked.shape == (2, 3, 3)
    assert model(lambda x: (x, PerMicroBatch(None)), chunks=2)(rows(4))[1] is None


def test_marked_ones_of_several_shapes_are_an_error():
    with pytest.raises(ValueError, match=r"marked by PerMicroBatch.*\(3, 3\), \(2, 3\)"):
        model(lambda x: PerMicroBatch(x), chunks=2)(rows(5))


def test_marked_inputs_are_an_error():
    with pytest.raises(TypeError, match="PerMicroBatch marks outputs.*NoChunk"):
        GPipe(nn.Sequential(nn.Identity()), [1], devices=["cpu"], chunks=2)([PerMicroBatch(rows())])


# Tensors that are not differentiable.


class Mixed(nn.Module):
    """A layer that returns tensors without a gradient before, between and behind others."""

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
    """Each micro-batch is cut to its own longest sequence."""

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
    """Structures of micro-batches may differ between layers, but not in the output."""

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


# Kinds of outputs.


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
    """A layer applied to the first of several tensors."""

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
    """Only layers look into objects that are no containers."""
    thing = SimpleNamespace(x=torch.rand(2))
    output = model(passed)((rows(), thing))
    assert output[1] is thing
