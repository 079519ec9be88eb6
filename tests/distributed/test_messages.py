"""Messages: what passes between processes comes out as it went in."""

import copy
import pickle
from datetime import date

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

from tests.distributed.test_schedules import beside, pipe_of
from tests.support.schedules import linear, same
from torchgpipe._torch.attributes import is_alone
from torchgpipe.distributed import peers
from torchgpipe.distributed.messages import pack, unpack
from torchgpipe.distributed.peers import Routes
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.skip.tracker import SkipLayout
from torchgpipe.values.microbatch import VALUE, Batch, PackedSkip
from torchgpipe.values.structure import flatten

leaves = st.one_of(
    st.builds(
        lambda shape, dtype: torch.ones(shape, dtype=dtype),
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
    ),
    st.none(),
    st.integers(),
    st.text(max_size=3),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=6,
)


def batch_of(value, *skips):
    """A micro-batch with skips."""
    parts = {("ns", f"skip {k}"): PackedSkip(*flatten(skip)) for k, skip in enumerate(skips)}
    return Batch(value).with_skips(parts)


@given(st.lists(values, min_size=1, max_size=3))
def test_there_and_back(parts):
    batch = batch_of(*parts)
    batch.shared = frozenset([VALUE])
    form, tensors = pack(batch)
    arrived = pickle.loads(pickle.dumps(form))
    assert all(x.is_like(y) and y.is_like(x) for x, y in zip(form.parts, arrived.parts))
    found = unpack(arrived, [x.clone() for x in tensors])
    assert found.shared == batch.shared
    for key, part in batch.parts.items():
        tensors, structure = flatten(found.structures[key].unflatten(found.parts[key]))
        assert structure.equals(batch.structures[key])
        for x, y in zip(tensors, part):
            assert torch.equal(x, y)
            assert x.dtype == y.dtype


def test_one_tensor_in_two_places_is_sent_once():
    x = torch.rand(3, requires_grad=True)
    form, tensors = pack(Batch((x, {"a": x}, x + 1)))
    assert len(tensors) == 2
    one, two, _ = unpack(form, [y.detach().clone() for y in tensors]).parts[VALUE]
    assert one is two
    assert one.requires_grad


class Thing:
    """An object that is equal to itself alone."""

    def __init__(self, number):
        self.number = number


@pytest.mark.parametrize(
    "other",
    [(torch.ones(2), 4), (torch.ones(3), 3), (torch.ones(2, dtype=torch.half), 3), torch.ones(2)],
    ids=["number", "shape", "dtype", "structure"],
)
def test_forms_differ(other):
    (one,), (two,) = (pack(Batch(value))[0].parts for value in ((torch.ones(2), 3), other))
    assert not one.is_like(two)


X = torch.ones(2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, X),
        ([X], {"a": X}),
        ((X, X + 1), (X, X)),
        (date(2000, 1, 1), date(2000, 1, 2)),
    ],
)
def test_differences_of_forms(one, other):
    (one,), (other,) = (pack(Batch(value))[0].parts for value in (one, other))
    assert not one.is_like(other)


def test_difference_in_what_shares_memory():
    (part,) = pack(Batch(X))[0].parts
    assert not part.is_like(part._replace(is_shared=True))


def test_objects_without_a_way_to_compare():
    one, other, same = (pack(batch_of(X, Thing(k)))[0].parts[1] for k in (1, 2, 1))
    assert one.is_like(same)
    assert not one.is_like(other)
    assert "skip 'skip 0'" in str(one)


def test_ways_of_skips():
    layout = SkipLayout(4, {"a": (0, 2), "b": (0, 3), "c": (1, 3), "d": (2, 3)})
    routes = Routes((0, 1, 1, 0), 0, layout)
    assert routes.carried == [["a"], ["c"], ["c", "d"], []]
    assert routes.stages == [0, 3]
    assert [routes.is_away(j) for j in range(-1, 5)] == [False, False, True, True, False, False]
    routes = Routes((0, 1, 2, 3), 1, layout)
    assert routes.carried == [["a", "b"], ["a", "b", "c"], ["b", "c", "d"], []]
    assert {routes.parts[name] for name in range(5)} == {None, "a", "b", "c", "d"}


def compare(group, layers, name, rows, chunks, plain=None):
    """Check that a step has the loss and the gradients of one process.

    Args:
        group: the processes.
        layers: the stages.
        name: the schedule.
        rows: the rows of the mini-batch.
        chunks: the number of micro-batches.
        plain: the same layers for one process, if they have to differ there.
    """
    torch.manual_seed(0)
    x, y = torch.rand(2, rows, 6)
    one, training = beside(plain or layers, chunks=chunks)
    expected = training(x, y)
    expected.backward()
    pipe = pipe_of(layers, name, group, chunks=chunks)
    torch.testing.assert_close(pipe.step(x, y), expected.detach())
    parameters = dict(one.module.named_parameters())
    for key, own in pipe.named_parameters():
        same(own.grad, parameters[key].grad)


class Buffer(nn.Module):
    """A layer that returns the same memory each time, if wanted."""

    def __init__(self, again):
        super().__init__()
        self.layer, self.again, self.kept = nn.Linear(6, 6), again, None

    def forward(self, x):
        y = self.layer(x)
        if not self.again:
            return y
        if self.kept is None or self.kept.shape != y.shape:
            self.kept = torch.empty_like(y)
        self.kept = self.kept.detach()
        return self.kept.copy_(y)


def again(group, name):
    """Check a layer that returns the same memory each time."""
    others = [linear() for _ in range(torch.distributed.get_world_size(group) - 1)]
    layers = [Buffer(again=True), *others]
    plain = copy.deepcopy(layers)
    plain[0].again = False
    compare(group, layers, name, 8, 4, plain)


@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
def test_memory_that_is_used_again(name, processes):
    processes.run(again, 4, name)


def sent_as_it_is(group):
    """Check that what only this process has made is sent without a copy."""
    pipe = pipe_of([linear(), linear()], "1f1b", group, chunks=2, checkpoint="never")
    x, y = torch.rand(2, 4, 6)
    # With the first messages go their forms.
    pipe.step(x, y)
    found = []

    def alone(x):
        found.append(is_alone(x))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "is_alone", alone)
        pipe.step(x, y)
    # The numbers before and after the step, and two micro-batches.
    assert found == [True, True, True, True]


def test_messages_are_not_copied(processes):
    processes.run(sent_as_it_is, 2)


class OneGradient(torch.autograd.Function):
    """A function whose backward returns the same tensor each time, if wanted."""

    kept = torch.empty(2, 6)

    @staticmethod
    def forward(ctx, x, again):
        ctx.again = again
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return (OneGradient.kept.copy_(grad * 2) if ctx.again else grad * 2), None


class Doubled(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again

    def forward(self, x):
        return OneGradient.apply(x, self.again)


def one_gradient(group, name):
    """Check a function that returns the same gradient each time."""
    layers = [linear(), Doubled(again=True), linear(), linear()]
    plain = copy.deepcopy(layers)
    plain[1].again = False
    compare(group, layers, name, 8, 4, plain)


@pytest.mark.parametrize("name", ["fill_drain", "1f1b"])
def test_gradients_whose_memory_is_used_again(name, processes):
    processes.run(one_gradient, 4, name)


class Conjugated(nn.Module):
    """A layer that returns a conjugated view."""

    def forward(self, x):
        return torch.complex(x, x + 1).conj()


class Real(nn.Module):
    """A layer that makes a conjugated view real."""

    def forward(self, x):
        return x.real - x.imag


def conjugated(group):
    compare(group, [Conjugated(), nn.Sequential(Real(), linear())], "1f1b", 8, 4)


def test_conjugated_views(processes):
    processes.run(conjugated, 2)


class Views(nn.Module):
    """A layer that changes its input in place, where that is a view of what another one gets."""

    def __init__(self, first):
        super().__init__()
        self.first = first

    def forward(self, x):
        return (x, x[:, :3]) if self.first else x[1].add_(1) + x[0][:, :3]


@skippable(stash=["view"])
class StashView(nn.Module):
    def forward(self, x):
        yield stash("view", x[:, :3])
        return x


@skippable(pop=["view"])
class PopView(nn.Module):
    def forward(self, x):
        view = yield pop("view")
        return view.add_(1) + x[:, :3]


def refused(group, *layers):
    """The error of two micro-batches in two stages."""
    pipe = pipe_of(layers, "fill_drain", group, chunks=2)
    with pytest.raises((TypeError, ValueError, RuntimeError)) as found:
        pipe(torch.rand(4, 6))
    return str(found.value)


def skip_changed_in_place(group):
    """Check that it is an error to change a skip in place that is a view of the value."""
    found = refused(group, StashView(), PopView())
    assert "views of one tensor" in found
    return found


def changed_in_place(group):
    return refused(group, Views(first=True), Views(first=False))


class Counted(nn.Module):
    """A layer that passes on one object, which it changes."""

    def __init__(self):
        super().__init__()
        self.thing = Thing(0)

    def forward(self, x):
        self.thing.number += 1
        return x, self.thing


def changed_object(group):
    """Check that an object is not taken for what it was."""
    return refused(group, Counted(), Second())


class Length(nn.Module):
    """A layer that passes on a number that differs between micro-batches."""

    def __init__(self, what):
        super().__init__()
        self.what, self.count = what, 0

    def forward(self, x):
        self.count += 1
        if self.what == "number":
            return x, self.count
        return x.repeat(1, self.count), 0


class Second(nn.Module):
    def forward(self, x):
        return x[0][:, :6]


def differing(group, what):
    return refused(group, Length(what), Second())


def unsendable(group):
    return refused(group, Unsendable(), Second())


class Unsendable(nn.Module):
    def forward(self, x):
        return x, lambda: 0
