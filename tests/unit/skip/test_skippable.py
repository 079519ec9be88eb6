"""Skippable layers by themselves: what they may yield, and that they stay layers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from torchgpipe.skip import Namespace, pop, skippable, stash
from torchgpipe.skip.tracker import SkipTracker, skips, use_skip_tracker


@skippable(stash=["x"])
class Stash(nn.Module):
    """A layer that stashes its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, input):
        yield stash("x", input)
        return self.linear(input)


@skippable(pop=["x"])
class Add(nn.Module):
    def forward(self, input):
        x = yield pop("x")
        return input + x


def layer(body, **declared):
    """A layer with a forward given as a function of its input."""

    class Layer(nn.Module):
        def forward(self, input):
            return body(input)

    return skippable(**declared)(Layer)()


def test_is_the_same_class():
    assert Stash.__doc__ == "A layer that stashes its input."
    assert type(Stash()).__name__ == "Stash"
    assert list(Stash().state_dict()) == ["linear.weight", "linear.bias"]
    model = nn.Sequential(Stash().isolate(ns := Namespace()), Add().isolate(ns))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = torch.rand(3, 2)
        assert torch.equal(twin(x), model(x))


def test_state_of_torchgpipe_0_0_7_loads():
    """torchgpipe 0.0.7 kept the layer below "module"."""
    state = {f"0.module.{key}": value for key, value in Stash().state_dict().items()}
    model = nn.Sequential(Stash())
    assert model.load_state_dict(state) == ([], [])
    assert torch.equal(model[0].linear.weight, state["0.module.linear.weight"])


def test_layer_with_a_module_of_its_own_loads():
    @skippable(stash=["x"])
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(1, 1)

        def forward(self, input):
            yield stash("x", input)
            return input

    assert Layer().load_state_dict(Layer().state_dict()) == ([], [])


@skippable(stash=["x"])
class Child(nn.Module):
    """Layers of 0.0.7 with a child called "module", of four kinds."""

    def __init__(self, kind):
        super().__init__()
        if kind == "chain":
            self.module = nn.Module()
            self.module.module = nn.Linear(1, 1)
        elif kind == "skippable":
            self.module = nn.Sequential(Stash())
        elif kind == "empty":
            self.module = nn.ReLU()
            self.scale = nn.Parameter(torch.ones(1))
        else:
            self.module = nn.BatchNorm1d(1)
            self.other = nn.Linear(1, 1)

    def forward(self, input):
        yield stash("x", input)
        return input


@pytest.mark.parametrize("kind", ["chain", "skippable", "empty", "beside"])
@pytest.mark.parametrize("prefix", ["", "0."])
def test_state_of_0_0_7_with_a_child_called_module(kind, prefix):
    def old(key):
        inner = kind == "skippable" and key.removeprefix("module.0.")
        return f"{prefix}module." + (f"module.0.module.{inner}" if inner else key)

    layer = Child(kind)
    model = layer if prefix == "" else nn.Sequential(layer)
    state = {key: x.clone() + 1 for key, x in layer.state_dict().items()}
    assert model.load_state_dict({old(key): x for key, x in state.items()}) == ([], [])
    assert all(torch.equal(x, state[key]) for key, x in layer.state_dict().items())
    # And its own keys, a part of them, and keys that are wrong.
    assert model.load_state_dict(model.state_dict()) == ([], [])
    some = dict(list(model.state_dict().items())[:1])
    assert model.load_state_dict(some, strict=False).unexpected_keys == []
    wrong = {f"{prefix}module.wrong": torch.zeros(1)}
    assert model.load_state_dict(wrong, strict=False).unexpected_keys == [f"{prefix}module.wrong"]


# One class under several names.


class Named(nn.Module):
    """A class that takes its name from outside."""

    def __init__(self, name="x"):
        super().__init__()
        self.name = name
        self.linear = nn.Linear(2, 2)

    def forward(self, input):
        yield stash(self.name, input)
        return self.linear(input)


Named_x = skippable(stash=["x"])(Named)
Named_y = skippable(stash=["y"])(Named)
Named_z = skippable(stash=["z"])(Named_y)


@skippable(stash=["x"])
class Derived(Named_y):
    pass


def test_decorated_twice():
    x = torch.rand(3, 2)
    layers = [Named_x(), Named_y("y"), Named_z("z"), Derived()]
    assert [skips(layer)[0][0][1] for layer in layers] == ["x", "y", "z", "x"]
    for layer in layers:
        assert isinstance(layer, Named)
        assert list(layer.state_dict()) == ["linear.weight", "linear.bias"]
        old = {f"module.{key}": value for key, value in layer.state_dict().items()}
        assert layer.load_state_dict(old) == ([], [])
        for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(twin) is type(layer)
            with use_skip_tracker(tracker := SkipTracker()):
                assert torch.equal(twin(x), layer.linear(x))
            assert tracker.load((None, layer.name)) is x
    assert Named_x is Named
    assert Named_y.__name__ == "Named"
    assert Named_y.__doc__ == Named.__doc__
    assert isinstance(Derived(), Named_y)
    assert not isinstance(Named_x(), Named_y)


def test_decorated_twice_alike_is_the_same_class():
    assert skippable(stash=["x"])(Named) is Named
    assert skippable(stash=["y"])(Named) is Named_y


def test_old_style_super():
    class Old(nn.Module):
        def __init__(self):
            super(Old, self).__init__()  # noqa: UP008 - as it was written in 2019
            self.linear = nn.Linear(1, 1)

        def forward(self, input):
            yield stash("x", input)
            return input

    # The class itself, and one that is derived from it for the other name.
    for name in ("x", "y"):
        assert isinstance(skippable(stash=[name])(Old)().linear, nn.Linear)


def test_isolate_leaves_the_class_and_the_other_names_alone():
    both = layer(lambda x: x, stash=["a"], pop=["b"])
    ns = Namespace()
    assert both.isolate(ns, only=["b"]) is both
    assert skips(both) == ([(None, "a")], [(ns, "b")])
    assert skips(Stash()) == ([(None, "x")], [])
    both.isolate(other := Namespace(), only=["a"])
    both.isolate(Namespace(), only=[])
    assert skips(both) == ([(other, "a")], [(ns, "b")])
    with pytest.raises(ValueError, match=r"name: 'c', declared: \['a', 'b'\]"):
        both.isolate(ns, only=["c"])


@pytest.mark.parametrize("argument", ["stash", "pop"])
@pytest.mark.parametrize("names", ["name", [1]])
def test_names_that_are_none(argument, names):
    with pytest.raises(TypeError, match=rf"{argument} must be a collection of names.*write"):
        skippable(**{argument: names})


def test_one_name_for_both():
    with pytest.raises(ValueError, match=r"names: \['x'\]"):
        skippable(stash=["x", "y"], pop=["x"])


def yielding(*asked):
    def body(x):
        for one in asked:  # noqa: UP028 - a tuple takes nothing that is sent
            yield one
        return x

    return body


def run(body, **declared):
    with use_skip_tracker(SkipTracker({(None, "p"): torch.ones(1)})):
        return layer(body, **declared)(torch.ones(1))


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([stash("s", ONE), stash("t", ONE)], r"can stash only what .*name: 't', declared: \['s'\]"),
        ([stash("s", ONE), stash("s", ONE)], r"can stash at most once in a run .*name: 's'"),
        ([pop("q")], r"can pop only what it declares .*name: 'q', declared: \['p'\]"),
        ([stash("s", ONE)], r"must pop all that it declares.*missing: \['p'\]"),
        ([pop("p")], r"must stash all that it declares.*missing: \['s'\].*stash None"),
    ],
)
def test_what_was_not_declared(asked, message):
    with pytest.raises(RuntimeError, match=message):
        run(yielding(*asked), stash=["s"], pop=["p"])


def test_plain_forward_that_should_have_stashed():
    with pytest.raises(RuntimeError, match=r"missing: \['s'\]"):
        run(lambda x: x, stash=["s"])


def test_pop_before_stash():
    with pytest.raises(RuntimeError, match="must be stashed by an earlier layer.*skip: 'x'"):
        Add()(torch.ones(1))


@pytest.mark.parametrize("value", [1, [ONE], "x"])
def test_other_values(value):
    tracker = SkipTracker()
    with use_skip_tracker(tracker):
        layer(yielding(stash("s", value)), stash=["s"])(ONE)
    assert tracker.load((None, "s")) is value
    with pytest.raises(TypeError, match=r"must yield stash\(name, tensor\) or pop\(name\)"):
        run(yielding(value))


def test_generator_at_fault_leaves_what_it_entered():
    def body(x):
        with torch.no_grad():
            yield pop("q")
        return x

    with pytest.raises(RuntimeError) as caught:
        run(body, pop=["p"])
    # The exception, which is still there, holds the generator.
    assert caught.value is not None
    assert torch.is_grad_enabled()
