"""Values that a model stores on its blocks: recomputations find those of their micro-batch."""

import copy
import gc
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.helpers import plain
from torchgpipe import MappedGPipe, is_recomputing

M = 3


class Block(nn.Module):
    """A block that reads what its parent has stored, here and in a module within."""

    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(4, 4), nn.Module()
        self.calls = 0

    def forward(self, x):
        self.calls += not is_recomputing()
        inner = self.inner
        return (self.linear(x) * inner.scale + getattr(self, "shift", 0.0)).tanh() * inner.options[
            0
        ]


class Parent(nn.Module):
    """A model that stores values on its blocks, and takes them back in one of these ways."""

    def __init__(self, after):
        super().__init__()
        self.embedding = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.after = after

    def forward(self, x):
        shift = self.embedding(x)
        for k, block in enumerate(self.blocks):
            block.inner.scale = x.mean() + k
            block.inner.options = (float(x[0, 0].detach()),)
            block.shift = shift
            x = block(x)
            if self.after == "none":
                block.shift = block.inner.scale = None
            elif self.after == "deleted":
                del block.shift, block.inner.scale
        return x


def places(*names):
    return dict.fromkeys(["", *names], "cpu")


def verify(module, chunks, mode, names):
    x = torch.rand(7, 4)
    own = copy.deepcopy(module)
    plain(module, x, chunks).square().sum().backward()
    model = MappedGPipe(own, places(*names), chunks=chunks, checkpoint=mode)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        for own, other in zip(model.parameters(), module.parameters()):
            torch.testing.assert_close(own.grad, other.grad)
    return model


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("chunks", [1, 2, M])
@pytest.mark.parametrize("after", ["kept", "none", "deleted"])
def test_gradients(after, chunks, mode):
    torch.manual_seed(0)
    names = ["embedding", *(f"blocks.{k}" for k in range(3))]
    model = verify(Parent(after), chunks, mode, names)
    block = model.blocks[0]
    # What there was when backward began is there again, and other attributes are the layers' own.
    assert hasattr(block, "shift") == (after != "deleted")
    assert block.calls == 2 * chunks


class Shared:
    """An object in which a model hands something down."""

    def __init__(self):
        self.last = None
        self.more = {"deep": [None]}


#: What a model puts within an attribute of its blocks, and how these find it.
WITHIN = {
    "list": (list, lambda box, x: box.append(x), lambda box: box[-1]),
    "dict": (dict, lambda box, x: box.update(x=x), lambda box: box["x"]),
    "set": (set, lambda box, x: (box.clear(), box.add(x)), lambda box: next(iter(box))),
    "deque": (lambda: deque(maxlen=2), lambda box, x: box.append(x), lambda box: box[-1]),
    "namespace": (
        SimpleNamespace,
        lambda box, x: setattr(box, "x", x),
        lambda box: getattr(box, "x"),  # noqa: B009
    ),
    "object": (Shared, lambda box, x: setattr(box, "last", x), lambda box: box.last),
    "nested": (
        lambda: ({"inner": Shared()},),
        lambda box, x: box[0]["inner"].more["deep"].__setitem__(0, x),
        lambda box: box[0]["inner"].more["deep"][0],
    ),
}


class Boxed(nn.Module):
    """A block that reads what its parent has put into a box."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.box = nn.Linear(4, 4), kind, WITHIN[kind][0]()

    def forward(self, x):
        return (self.linear(x) * WITHIN[self.kind][2](self.box)).tanh()


class Boxes(nn.Module):
    """A model that fills the boxes of its blocks, new ones in some cases, and may empty them."""

    def __init__(self, kind, way):
        super().__init__()
        self.blocks, self.way = nn.ModuleList([Boxed(kind) for _ in range(2)]), way

    def forward(self, x):
        make, put, _ = WITHIN[self.blocks[0].kind]
        for block in self.blocks:
            if self.way != "kept":
                block.box = make()
            put(block.box, x.mean())
            x = block(x)
            if self.way == "emptied":
                put(block.box, x.new_zeros(()))
        return x


@pytest.mark.parametrize("way", ["kept", "new", "emptied"])
@pytest.mark.parametrize("kind", WITHIN)
def test_what_is_within_an_attribute(kind, way):
    torch.manual_seed(0)
    model = verify(Boxes(kind, way), M, "always", ["blocks.0", "blocks.1"])
    # What there was when backward began is there again.
    box = model.blocks[0].box
    x = WITHIN[kind][2](box)
    assert (x == 0) == (way == "emptied")
    if kind == "list" and way == "kept":
        assert len(box) == 2 * M


def test_block_that_is_called_several_times():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.block.inner.options = (1.0,)

        def forward(self, x):
            for k in range(3):
                self.block.inner.scale = x.detach().mean() * (k + 1)
                x = self.block(x)
            return x

    torch.manual_seed(0)
    verify(Repeated(), M, "always", ["block"])


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_the_parent_stores(persistent):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", None, persistent=persistent)

        def forward(self, x):
            return (self.linear(x) * self.mask).tanh()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Masked(), Masked()

        def forward(self, x):
            self.first.mask = self.second.mask = x.detach().mean()
            return self.second(self.first(x))

    torch.manual_seed(0)
    verify(Model(), M, "always", ["first", "second"])


def test_change_of_a_block_itself_is_its_own_affair():
    """A block that holds its change back where it is computed again finds it there."""

    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.count = nn.Linear(4, 4), 0

        def forward(self, x):
            if not is_recomputing():
                self.count += 1
            return (self.linear(x) * self.count).tanh()

    torch.manual_seed(0)
    module = nn.Sequential(Count())
    expected = copy.deepcopy(module)
    x = torch.rand(4, 4)
    expected(x).sum().backward()
    MappedGPipe(module, places("0"), checkpoint="always")(x).sum().backward()
    torch.testing.assert_close(module[0].linear.weight.grad, expected[0].linear.weight.grad)


class Failing(nn.Module):
    """A model that takes back what it has stored, and may raise then."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(4, 4), Scaled(), False

    def forward(self, x):
        x = self.first(x)
        self.last.scale = x.mean()
        self.seen = weakref.ref(self.last.scale)
        y = self.last(x)
        self.last.scale = None
        if self.fails:
            raise ValueError
        return y


class Scaled(nn.Module):
    """A block whose class names an attribute that its parent stores among its constants."""

    __constants__ = ("count",)

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.count = nn.Linear(4, 4), None, 1

    def forward(self, x):
        return (self.linear(x) * self.scale * self.count).tanh()


def test_a_step_that_fails_holds_nothing_that_was_stored():
    model = Failing()
    pipe = MappedGPipe(model, places("first", "last"), chunks=2, checkpoint="always")
    x = torch.rand(4, 4)
    for model.fails in (False, True):
        try:
            pipe(x).sum().backward()
        except ValueError as error:
            del error
        gc.collect()
        assert model.seen() is None


def test_whole_numbers_that_a_class_calls_constants():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last, self.count = nn.Linear(4, 4), Scaled(), 0
            self.last.scale = 1.0

        def forward(self, x):
            # Another number for each micro-batch.
            self.last.count = 1 + int(x.sum() > 2)
            return self.last(self.first(x))

    model = Counting()
    x = torch.tensor([[0.1] * 4, [0.1] * 4, [0.9] * 4, [0.9] * 4])
    plain(model, x, 2).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pipe = MappedGPipe(model, places("first", "last"), chunks=2, checkpoint="always")
    pipe(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


class Checkpointed(nn.Module):
    """A block that a model stores a mask on, and a checkpoint of PyTorch around it or within."""

    def __init__(self, where, reentrant, value):
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), Masked(where == "within", reentrant)
        self.where, self.reentrant, self.value = where, reentrant, value

    def forward(self, x):
        y = self.first(x)
        self.block.mask = self.value(x)
        if self.where == "around":
            return checkpoint(self.block, y, use_reentrant=self.reentrant)
        return self.block(
            y if self.where == "within" else checkpoint(torch.tanh, y, use_reentrant=False)
        )


class Masked(nn.Module):
    def __init__(self, within, reentrant):
        super().__init__()
        self.linear, self.within, self.reentrant = nn.Linear(4, 4), within, reentrant

    def forward(self, x):
        if self.within:
            return checkpoint(self.compute, x, use_reentrant=self.reentrant)
        return self.compute(x)

    def compute(self, x):
        mask = self.mask if isinstance(self.mask, torch.Tensor) else vars(self.mask)["mask"]
        return (self.linear(x).sin() * mask).tanh()


def signs(x):
    return x.detach().sign()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("value", [signs, lambda x: SimpleNamespace(mask=signs(x))])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["around", "within"])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_stored_for_a_checkpoint_of_pytorch(mode, where, reentrant, value):
    """A recomputation of PyTorch's would find what the last micro-batch has stored."""
    model = Checkpointed(where, reentrant, value)
    pipe = MappedGPipe(model, {"first": "cpu", "block": "cpu"}, chunks=4, checkpoint=mode)
    with torch.no_grad():
        pipe(torch.randn(8, 4))
    with pytest.raises(RuntimeError, match=r"\(module: block, attribute: mask\); pass them as"):
        pipe(torch.randn(8, 4))


def assert_same_gradients(pipe, reference):
    """Compare with a plain model that runs backward after each micro-batch."""
    x = torch.randn(8, 4)
    for part in x.chunk(4):
        reference(part).sum().backward()
    pipe(x).sum().backward()
    for own, other in zip(pipe.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_stored_beside_a_checkpoint_of_pytorch(mode):
    model = Checkpointed("before", False, signs)
    reference = copy.deepcopy(model)
    pipe = MappedGPipe(model, {"first": "cpu", "block": "cpu"}, chunks=4, checkpoint=mode)
    assert_same_gradients(pipe, reference)


class Normalized(nn.Module):
    """Two blocks with one layer, whose hook sets its weight before each call."""

    def __init__(self, where):
        super().__init__()
        core = nn.utils.weight_norm(nn.Linear(4, 4))
        self.a, self.b, self.where = nn.Sequential(core), Within(core), where

    def forward(self, x):
        if self.where == "around":
            return self.b.core(checkpoint(self.a, x, use_reentrant=False).sin())
        return self.b(self.a(x).sin())


class Within(nn.Module):
    def __init__(self, core):
        super().__init__()
        self.core = core

    def forward(self, x):
        return checkpoint(self.core, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("where", ["around", "within"])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_set_by_a_call_within_a_checkpoint_of_pytorch(mode, where):
    """A recomputation sets it anew, though another block has set it in between."""
    model, reference = Normalized(where), Normalized(where)
    reference.load_state_dict(model.state_dict())
    pipe = MappedGPipe(model, {"a": "cpu", "b": "cpu"}, chunks=4, checkpoint=mode)
    assert_same_gradients(pipe, reference)
