"""Values of any structure: into the model, between its layers, and out of it.

The reference is the plain module, run on the micro-batches one after another.
"""

from collections import OrderedDict
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests.support.helpers import MODES
from tests.support.size import some
from tests.support.structures import (
    Custom,
    Partial,
    Point,
    Registered,
    model,
    passed,
    rows,
    summed,
    verify,
)
from torchgpipe import GPipe, NoChunk, ScheduledLoss
from torchgpipe.values.division import is_list_of_rows

# Arguments of the first layer.


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


def test_input_by_the_name_that_a_sequential_gives_it():
    x = rows()
    wrapped = model(Attention(), passed)
    expected = wrapped.module(input=x)
    torch.testing.assert_close(wrapped(input=x), expected)

    class Named(nn.Module):
        def forward(self, input, scale):
            return input * scale

    assert torch.equal(model(Named())(input=x, scale=2), x * 2)


# Splitting.


def test_different_numbers_of_rows_are_an_error():
    with pytest.raises(ValueError, match=r"kwargs\['mask'\]\": \(4,\).*torchgpipe.NoChunk"):
        model(Attention())(rows(5), mask=torch.zeros(4).bool())
    with pytest.raises(ValueError, match=r"\['x'\]\[1\]\": \(4, 3\)"):
        model(passed)({"x": [rows(5), rows(4)]})


def test_containers_without_names():
    """Errors count the leaves of a class that was registered without names."""
    with pytest.raises(ValueError, match=r"'leaf 0': \(5, 3\), 'leaf 1': \(4, 3\)"):
        model(passed)(Custom([rows(5), rows(4)], "label"))
    with pytest.raises(ValueError, match="output: leaf 1, micro-batch 0: 3, micro-batch 1: 2"):
        model(Partial(lambda x: Custom([x, len(x)], "label")))(rows())
    with pytest.raises(ValueError, match="same structure"):
        model(Partial(lambda x: Custom([x], len(x))))(rows())


def jagged(x):
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


@pytest.mark.parametrize(
    "make",
    [lambda x: x.to_sparse(), jagged],
    ids=["sparse", "nested"],
)
def test_what_is_not_dense_is_not_split(make):
    x = make(rows(4))
    with pytest.raises(ValueError, match="only dense tensors.*the value, layout: .*NoChunk"):
        model(passed)(x)
    output, size = model(Partial(lambda x: [x, x.shape[0]]), chunks=1)(x)
    assert (output.layout, size) == (x.layout, x.shape[0])


@pytest.mark.parametrize("rows_of_targets", [4, 6])
@pytest.mark.parametrize("name", ["sparse", "nested"])
def test_targets_that_are_not_dense_are_not_split(name, rows_of_targets):
    make = {"sparse": lambda x: x.to_sparse(), "nested": jagged}[name]
    step = ScheduledLoss(model(passed), lambda x, y: x.sum() + 0 * y.sum())
    with pytest.raises(ValueError, match=r"only dense tensors.*argument: targets\[0\], layout"):
        step(rows(4), make(rows(rows_of_targets)))


def test_nothing_to_split():
    with pytest.raises(ValueError, match="must be an input tensor to split.*chunks: 2"):
        model(passed)({"x": torch.tensor(1.0), "n": 3})
    assert verify(model(passed, chunks=1), {"x": torch.tensor(1.0), "n": 3})["x"].shape == (1,)
    assert torch.equal(model(lambda: torch.ones(()), chunks=1)(), torch.tensor([1.5]))


# Any structure.


class Scale(nn.Module):
    """A layer that maps over the tensors, floating-point ones otherwise than integers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, value):
        def scale(x):
            return (x * self.weight).sin() if x.is_floating_point() else x + 1

        return tree_map_only(Tensor, scale, value)


class Nest(nn.Module):
    """A layer that nests its input deeper, beside new tensors."""

    def forward(self, value):
        found = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim()]
        x = found[-1]
        return {"b": [value, x.double().tanh().sum()], "a": Point(x.argmax(), (None, 7, "seven"))}


class Stop(nn.Module):
    def forward(self, value):
        tensors = iter(range(len(tree_leaves(value))))
        return tree_map_only(Tensor, lambda x: x.detach() if next(tensors) % 2 else x, value)


class Reverse(nn.Module):
    """A layer that reverses lists and tuples."""

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
    lists = st.lists(children, max_size=3)
    keys = st.sampled_from("xyz")
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(keys, children, max_size=2).map(OrderedDict),
        st.tuples(children, children).map(lambda pair: Point(*pair)),
        st.tuples(children, children).map(lambda pair: Registered(*pair, scale=lambda: 2.0)),
        lists.map(lambda children: Custom(children, "label")),
    )


def test_lists_alone_that_could_be_containers():
    layers = nn.Sequential(Partial(lambda both: torch.stack(both[0], 1)), nn.Linear(2, 2))
    images = [torch.rand(3, 2) for _ in range(4)]
    pipe = GPipe(layers, [2], devices=["cpu"], chunks=2)
    torch.testing.assert_close(pipe((images, images)), layers((images, images)))
    layers = nn.Sequential(Partial(lambda both: torch.stack(both[0])), nn.Linear(2, 2))
    pipe = GPipe(layers, [2], devices=["cpu"], chunks=2)
    with pytest.warns(UserWarning, match=r"\[0\], entries: 4.*pass a tuple"):
        torch.testing.assert_close(pipe((images, [*"abcd"])), layers((images, None)))


def test_lists_with_an_entry_for_each_row_do_not_come_out():
    images = [torch.rand(3, 2) for _ in range(5)]
    value = images, [{"boxes": x} for x in images]
    pipe = GPipe(nn.Sequential(Partial(lambda both: both[0])), [1], devices=["cpu"], chunks=2)
    with pytest.raises(ValueError, match=r"entries: 3, rows: \[3, 2\]\).*Chunks"):
        pipe(value)
    # Some levels of features, which have all rows.
    for levels in (2, 3):
        levelled = Partial(lambda both, n=levels: [torch.stack(both[0])] * n)
        pipe = GPipe(nn.Sequential(levelled), [1], devices=["cpu"], chunks=2)
        torch.testing.assert_close(pipe(value), levelled(value))


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
    # A list with an entry for each row is divided as a list.
    lists = filter(is_list_of_rows, tree_leaves(value, is_list_of_rows))
    assume(all(len(x) != n for x in lists))
    return value, layers, balance


@pytest.mark.filterwarnings("ignore:GPipe splits tensors")
@settings(max_examples=some(50, 20))
@given(cases(), st.integers(1, 4), st.sampled_from(MODES))
def test_any_structure(case, chunks, mode):
    value, layers, balance = case
    if any(isinstance(leaf, NoChunk) for leaf in tree_leaves(value)):
        layers, balance = [*layers, Partial(summed)], [*balance, 1]
    torch.manual_seed(0)
    verify(model(*layers, balance=balance, chunks=chunks, mode=mode), value)
