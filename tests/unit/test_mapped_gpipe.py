"""A wrapped model is the model, but for what its calls do."""

import copy
import inspect
import pickle
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.support.helpers import note_of
from torchgpipe import Chunks, MappedGPipe, NoChunk, PerMicroBatch, is_recomputing


class Model(nn.Module):
    """Two blocks that are called by name, with code between them."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.second = nn.Linear(4, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *, shift=None, double=False):
        x = self.dropout(self.first(x) * self.scale)
        if shift is not None:
            x = x + shift
        y = self.second(input=x)
        return {"loss": y.square().mean(), "y": y * 2 if double else y}


MAP = {"": "cpu", "first": "cpu", "second": "cpu"}


def wrapped(model=None, **options):
    return MappedGPipe(model or Model(), MAP, **{"chunks": 2, **options})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied):
    pipe = wrapped()
    again = copied(pipe)
    assert again.module is not pipe.module
    assert again.scale is again.module.scale
    # A copy of the model alone is an ordinary model.
    assert copied(pipe.module).first._compiled_call_impl is None


def test_a_copy_of_a_model_that_copies_itself():
    # PyTorch gives a parametrised module a __deepcopy__.
    pipe = MappedGPipe(weight_norm(nn.Linear(3, 3)), {"": "cpu"})
    again = copy.deepcopy(pipe)
    assert isinstance(again, MappedGPipe)
    assert copy.deepcopy(pipe.module)._compiled_call_impl is None


def test_calls_outside_of_a_step_are_those_of_the_model():
    pipe = wrapped()
    x = torch.rand(4, 3)
    torch.testing.assert_close(pipe.module(x)["y"], pipe(x)["y"])
    assert pipe.module(x)["loss"].shape == ()


def test_errors_of_code_between_modules_name_the_module_before_it():
    with pytest.raises(RuntimeError, match="size") as caught:
        wrapped()(torch.rand(4, 3), shift=NoChunk(torch.rand(7)))
    assert note_of(caught.value) == "raised after first on cpu, micro-batch 0"


def test_a_module_that_is_called_in_another_thread():
    from concurrent.futures import ThreadPoolExecutor

    class Threaded(Model):
        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.first, x).result()

    with pytest.raises(RuntimeError, match=r"thread that called the wrapper \(module: first"):
        wrapped(Threaded())(torch.rand(4, 3))


def test_two_wrappers_of_one_model():
    old = wrapped()
    new = MappedGPipe(old.module, MAP)
    new(torch.rand(2, 3))
    with pytest.raises(RuntimeError, match=r"their wrapper \(modules: \['first', 'second'\]"):
        old(torch.rand(2, 3))


class Changing(nn.Module):
    """A block that changes its arguments, of which one is in a class that PyTorch does not know."""

    def forward(self, held, counts):
        counts["calls"] += 1
        x = held.pop()
        held += [x.sin(), "more"]
        return x * counts["calls"]


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(3, 3), Changing()

    def forward(self, x):
        held, counts = [self.first(x)], Counter()
        return self.block(held, counts) + held[0], len(held), counts["calls"]


@pytest.mark.parametrize("mode", ["never", "always"])
def test_a_module_that_changes_its_arguments(mode):
    pipe = MappedGPipe(Caller(), {"first": "cpu", "block": "cpu"}, chunks=2, checkpoint=mode)
    x = torch.rand(4, 3)
    (found, *seen), (expected, *_) = pipe(x), pipe.module(x)
    torch.testing.assert_close(found, expected)
    assert seen == [2, 1]
    grads = [torch.autograd.grad(y.square().sum(), pipe.parameters()) for y in (found, expected)]
    torch.testing.assert_close(*grads)


def test_a_model_that_is_compiled_around_its_modules():
    model = Model()
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"\(compiled: the model\)"):
        wrapped(model)(torch.rand(4, 3))


def test_attributes_of_the_model():
    model = Model()
    model.config = "config"
    pipe = wrapped(model)
    assert pipe.config == "config"
    with pytest.raises(AttributeError, match="nothing"):
        _ = pipe.nothing


def test_caches_are_off():
    class Caching(Model):
        def forward(self, x, use_cache=True):
            return super().forward(x), PerMicroBatch(torch.tensor(use_cache))

    pipe = wrapped(Caching())
    assert pipe(torch.rand(4, 3))[1].tolist() == [False, False]
    assert pipe(torch.rand(4, 3), use_cache=True)[1].tolist() == [True, True]


def test_the_signature_is_that_of_the_model():
    class Model(nn.Module):
        def forward(self, x, *, labels=None):
            return x if labels is None else (x - labels).square()

    for pipe in (one := MappedGPipe(Model(), {"": "cpu"}), copy.deepcopy(one)):
        assert [*inspect.signature(pipe.forward).parameters] == ["x", "labels"]
        assert pipe.forward(torch.ones(1), labels=torch.ones(1)).item() == 0
    assert [*inspect.signature(MappedGPipe.forward).parameters] == ["self", "args", "kwargs"]


class Doubled(nn.Module):
    """A model that needs the values of its inputs in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, scale):
        return {"y": self.last(self.first(x).sin() * scale["by"])}


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("name", [r"args\[0\]", "scale"])
@pytest.mark.parametrize("marked", [False, True])
def test_an_input_that_is_changed_before_backward_is_an_error(name, mode, marked):
    pipe = MappedGPipe(Doubled(), {"first": "cpu", "last": "cpu"}, chunks=2, checkpoint=mode)
    x, scale = torch.rand(4, 3), torch.rand(4, 3)
    given = Chunks([x[:2], x[2:]]) if marked else x
    pipe(given, scale={"by": scale})["y"].sum().backward()
    pipe.zero_grad()
    output = pipe(given, scale={"by": scale})["y"]
    (scale if name == "scale" else x)[0] += 1
    message = rf"an input must not be changed.*\(input: {name}, version: \d+, expected"
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()
    assert all(p.grad is None for p in pipe.parameters())


@pytest.mark.parametrize("mode", ["always", "never"])
def test_a_model_may_change_its_rows_of_an_input(mode):
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)

        def forward(self, x):
            x -= x.mean(1, keepdim=True)
            return self.first(x)

    plain = Centred()
    pipe = MappedGPipe(copy.deepcopy(plain), {"first": "cpu"}, chunks=2, checkpoint=mode)
    x = torch.rand(4, 3)
    plain(x.clone()).sum().backward()
    pipe(x).sum().backward()
    grads = [[p.grad for p in m.parameters()] for m in (plain, pipe)]
    torch.testing.assert_close(*grads)


def test_errors_about_what_a_module_changes_name_it():
    class Adding(nn.Linear):
        def forward(self, x):
            return super().forward(x.add_(1))

    layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), Adding(3, 3))
    pipe = MappedGPipe(layers, dict.fromkeys("012", "cpu"), chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match=r"must not change its input.*\(layer: 2\)"):
        pipe(torch.rand(4, 3))

    class Other(nn.Linear):
        def forward(self, x):
            y = super().forward(x).sin()
            return y[:1].sin() if is_recomputing() else y.sin()

    layers = nn.Sequential(nn.Linear(3, 3), Other(3, 3), nn.Linear(3, 3))
    pipe = MappedGPipe(layers, dict.fromkeys("012", "cpu"), chunks=2, checkpoint="always")
    with pytest.raises(RuntimeError, match="torch.float32 by layer 1,") as caught:
        pipe(torch.rand(4, 3)).sum().backward()
    assert note_of(caught.value) == "raised in 1 on cpu, micro-batch 1"
