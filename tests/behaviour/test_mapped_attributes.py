"""A model must not change, between calls of its modules, what they hold."""

import copy
import gc
import weakref
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe import MappedGPipe, is_recomputing


def places(*names):
    return dict.fromkeys(["", *names], "cpu")


class Shared:
    """An object in which a model hands something down."""

    def __init__(self):
        self.last = None
        self.more = {"deep": [None]}


#: What a block holds, and how a model changes that.
HELD = {
    "attribute": (lambda: 1.0, lambda block, x: setattr(block, "held", x)),
    "number": (lambda: 1.0, lambda block, x: setattr(block, "held", x.item())),
    "module within": (lambda: 1.0, lambda block, x: setattr(block.linear, "held", x)),
    "list": (list, lambda block, x: block.held.__setitem__(slice(None), [x])),
    "dict": (dict, lambda block, x: block.held.update(x=x)),
    "set": (set, lambda block, x: (block.held.clear(), block.held.add(x))),
    "deque": (deque, lambda block, x: block.held.append(x)),
    "namespace": (SimpleNamespace, lambda block, x: setattr(block.held, "x", x)),
    "nested": (
        lambda: ({"inner": Shared()},),
        lambda block, x: block.held[0]["inner"].more["deep"].__setitem__(0, x),
    ),
}


class Block(nn.Module):
    """A block with something that its parent may change."""

    def __init__(self, held):
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), held

    def forward(self, x):
        return self.linear(x).tanh()


class Parent(nn.Module):
    """A model that changes what its blocks hold, in front of their calls or after them."""

    def __init__(self, kind, way):
        super().__init__()
        make, self.change = HELD[kind]
        self.blocks, self.way = nn.ModuleList([Block(make()) for _ in range(2)]), way

    def forward(self, x):
        for block in self.blocks:
            if self.way == "before":
                self.change(block, x.detach().mean())
            x = block(x)
            if self.way == "after":
                self.change(block, x.detach().mean())
        return x


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize("way", ["before", "after"])
@pytest.mark.parametrize("kind", HELD)
def test_what_a_model_changes(kind, way, mode):
    model = Parent(kind, way)
    pipe = MappedGPipe(model, places("blocks.0", "blocks.1"), chunks=3, checkpoint=mode)
    x = torch.rand(6, 4)
    with torch.no_grad():
        pipe(x)
    name = "linear.held" if kind == "module within" else "held"
    message = rf"nothing must change .*\(module: blocks.0, attribute: {name.split('.')[-1]}\); pass"
    with pytest.raises(RuntimeError, match=message):
        pipe(x)


def test_a_list_may_grow():
    """Several layers may note what they do in one list."""
    noted = []
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)])
    for layer in model:
        layer.noted = noted
        layer.register_forward_hook(lambda layer, args, y: layer.noted.append(y.detach()))
    pipe = MappedGPipe(model, places("0", "1"), chunks=3)
    pipe(torch.rand(6, 4)).sum().backward()
    assert len(noted) >= 6


def test_one_micro_batch():
    """The only micro-batch finds what was set when it is computed again."""
    names = places("blocks.0", "blocks.1")
    pipe = MappedGPipe(Parent("attribute", "before"), names, checkpoint="always")
    pipe(torch.rand(6, 4)).sum().backward()
    pipe = MappedGPipe(Parent("attribute", "after"), names, checkpoint="always")
    with pytest.raises(RuntimeError, match="attribute: held"):
        pipe(torch.rand(6, 4))


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_that_the_parent_stores(persistent):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(4, 4)
            self.block.register_buffer("mask", None, persistent=persistent)

        def forward(self, x):
            self.block.mask = x.detach().mean()
            return self.block(x)

    pipe = MappedGPipe(Model(), places("block"), chunks=2)
    with pytest.raises(RuntimeError, match="attribute: mask"):
        pipe(torch.rand(4, 4))


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


class Leaving(nn.Linear):
    """A layer that leaves a tensor on itself."""

    def __init__(self):
        super().__init__(4, 4)
        self.left = None

    def forward(self, x):
        x = super().forward(x)
        if not is_recomputing():
            self.left = x.detach().clone()
        return x


class Failing(nn.Module):
    """A model that may raise after its layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.fails = Leaving(), False

    def forward(self, x):
        x = self.layer(x)
        if self.fails:
            raise ValueError
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_else_holds_what_a_layer_leaves(fails):
    model = Failing()
    pipe = MappedGPipe(model, places("layer"), chunks=2, checkpoint="always")
    model.fails = fails
    try:
        pipe(torch.rand(4, 4)).sum().backward()
    except ValueError as error:
        del error
    left = weakref.ref(model.layer.left)
    model.layer.left = None
    gc.collect()
    assert left() is None


def assert_same_gradients(pipe, reference):
    """Compare with a plain model that runs backward after each micro-batch."""
    x = torch.randn(8, 4)
    for part in x.chunk(4):
        reference(part).sum().backward()
    pipe(x).sum().backward()
    for own, other in zip(pipe.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


class Normalized(nn.Module):
    """Two blocks with one layer, whose hook sets its weight before each call."""

    def __init__(self, where):
        super().__init__()
        core = nn.utils.weight_norm(nn.Linear(4, 4))
        self.a, self.b, self.where = nn.Sequential(core), Within(core, where), where

    def forward(self, x):
        if self.where == "around":
            return self.b(checkpoint(self.a, x, use_reentrant=False).sin())
        return self.b(self.a(x).sin())


class Within(nn.Module):
    def __init__(self, core, where):
        super().__init__()
        self.core, self.where = core, where

    def forward(self, x):
        if self.where == "within":
            return checkpoint(self.core, x, use_reentrant=False)
        return self.core(x)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("where", ["around", "within"])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_set_by_a_call_within_a_checkpoint_of_pytorch(mode, where):
    """A recomputation sets it anew, though another block has set it in between."""
    model, reference = Normalized(where), Normalized(where)
    reference.load_state_dict(model.state_dict())
    pipe = MappedGPipe(model, {"a": "cpu", "b": "cpu"}, chunks=4, checkpoint=mode)
    assert_same_gradients(pipe, reference)
