"""Tensors of any shape, type and layout."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.comparing import assert_as_plain, layers_of, mean_of_squares
from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import assert_same_grads, plain_step
from tests.support.structures import Partial, integers, passed, rows
from torchgpipe import PerMicroBatch


@promise(
    "Outputs without a dimension, as losses, are stacked, one for each micro-batch, and so is what "
    "PerMicroBatch marks, whichever layer returned it; the mark does not come out.",
    modes=True,
    devices=True,
)
def one_for_each_micro_batch(make):
    def marked(x):
        found = {"mean": x.mean(0), "m": x.T @ x, "s": x.sum(), "nothing": None}
        one = {"loss": x.square().mean(), "n": x.argmax()}
        return {"x": x.sin(), "m": PerMicroBatch(found), **one}

    layers = layers_of(passed, Partial(marked), Partial(lambda v: v | {"x": v["x"] + 1}))
    for chunks in make.some((2, 1, 3)):
        model = assert_as_plain(make, layers, rows(6), chunks=chunks)
        found = {name: x.shape for name, x in model.output["m"].items() if x is not None}
        assert found == {"mean": (chunks, 3), "m": (chunks, 3, 3), "s": (chunks,)}
        assert model.output["loss"].shape == model.output["n"].shape == (chunks,)


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


@promise("Shapes may change from step to step, rows and other dimensions.", modes=True)
def shapes_of_steps(make):
    layers = layers_of(nn.Linear(3, 3), nn.Tanh(), lambda x: x.cumsum(1))
    model = make(layers, chunks=3, loss=mean_of_squares)
    for shape in make.some([(6, 4, 3), (6, 7, 3), (2, 1, 3), (1, 5, 3), (4, 2, 2, 3)]):
        x = torch.rand(shape)
        expected = plain_step(layers, x, loss=mean_of_squares)
        torch.testing.assert_close(model.step(x), expected)
    assert_same_grads(model, layers)


def cut(value):
    """Cut sequences to the longest of the micro-batch."""
    x, lengths = value
    n = int(lengths.max())
    return {"x": x[:, :n], "mask": torch.arange(n) < lengths[:, None], "n": n}


def pooled(value):
    return (value["x"].tanh() * value["mask"][..., None]).sum(1) / value["n"]


ANNOUNCED = (
    "a form is announced to the other process once, for all micro-batches of as many rows; what "
    "differs is an error that names it"
)


@promise(
    "Between layers, shapes may differ from micro-batch to micro-batch, as where each is cut to "
    "its own longest sequence.",
    modes=True,
    eager=True,
    fails=True,
    otherwise={
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
    "half": torch.Tensor.half,
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


def conjugate(x):
    return torch.complex(x.sin(), x.cos()).conj()


def real(z):
    return z.real.sin() * z.imag if z.is_complex() else z.sin()


class Conjugated(nn.Module):
    """A layer whose weight gets a conjugate for a gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.complex64))

    def forward(self, x):
        return real(x * self.weight.conj())


@promise(
    "Conjugates and negatives that PyTorch has not computed yet (a bit of the tensor says so, as "
    "after conj()) may be inputs, pass between layers, be gradients, and leave the model.",
    modes=True,
    devices=True,
)
def bits(make):
    for lazy in make.some((lambda x: conjugate(x).imag, conjugate)):
        layers = layers_of(real, nn.Linear(3, 3), Partial(lazy), real, Conjugated(), Partial(lazy))
        assert_as_plain(make, layers, lazy(torch.rand(6, 3)).requires_grad_(), chunks=3)
        pair = Partial(lambda x: torch.complex(x.sin(), x.cos()))
        layers = layers_of(nn.Linear(3, 3), pair, torch.conj, real)
        assert_as_plain(make, layers, rows(6), chunks=3, steps=3)


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
        return {"x": x.sin(), "y": x[:, :0], "n": integers(len(x)), "sum": x.sum()}

    def some(v):
        return v | {"y": v["y"] * 2, "x": v["x"] + v["y"].sum()}

    for count, chunks in make.some(((0, 2), (4, 2), (0, 1))):
        layers = layers_of(nn.Linear(3, 3), split, some)
        model = assert_as_plain(make, layers, rows(count), loss=total, chunks=chunks)
        assert model.output["y"].shape == (count, 0)


ZEROS = Otherwise("where no gradient comes from another process, zeros do", "^zeros")


@promise(
    "What comes from a layer and goes nowhere gets no gradient: it stays None.",
    modes=True,
    otherwise={"Pipe": ZEROS},
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
