"""Skip layout: the partitions that skips connect, and faults found before anything runs."""

import copy

import pytest
from torch import nn

from torchgpipe import GPipe
from torchgpipe.skip import Namespace, skippable, stash, verify_skippables
from torchgpipe.skip.tracker import inspect_skip_layout


def layer(stash=(), pop=()):
    class Layer(nn.Module):
        pass

    return skippable(stash=stash, pop=pop)(Layer)()


def layout(*layers, balance):
    layers = iter(layers)
    return inspect_skip_layout([nn.Sequential(*[next(layers) for _ in range(k)]) for k in balance])


A, B = (None, "a"), (None, "b")


def test_between_partitions():
    found = layout(
        layer(["a", "b"]), nn.ReLU(), layer(pop=["b"]), layer(pop=["a"]), balance=[1, 2, 1]
    )
    assert found.stashed == [{A: 2, B: 1}, {}, {}]
    assert found.popped == [{}, {B: 0}, {A: 0}]
    assert found.pairs == [(0, 1), (0, 2)]


def test_layers_within_layers():
    nested = nn.Sequential(nn.Sequential(layer(["a"])), nn.ReLU())
    found = layout(nested, layer(pop=["a"]), balance=[1, 1])
    assert found.stashed == [{A: 1}, {}]
    verify_skippables(nn.Sequential(nested, layer(pop=["a"])))


def test_order_within_a_layer_is_its_own_affair():
    """Nobody knows in which order a layer runs its inner layers, so their order is not checked."""
    block = nn.ModuleDict({"down": layer(pop=["a"]), "up": layer(["a"])})
    verify_skippables(nn.Sequential(block))
    assert layout(block, balance=[1]).stashed == [{}]


def test_namespaces_are_kept_apart():
    one, two = Namespace(), Namespace()
    layers = [layer(["a"]).isolate(one), layer(["a"]).isolate(two)]
    layers += [layer(pop=["a"]).isolate(one), layer(pop=["a"]).isolate(two)]
    found = layout(*layers, balance=[1, 1, 1, 1])
    assert found.stashed == [{(one, "a"): 2}, {(two, "a"): 3}, {}, {}]
    verify_skippables(nn.Sequential(*layers))


@pytest.mark.parametrize(
    ("layers", "faults"),
    [
        ([layer(["a"])], ["0 stashes 'a', which no layer pops"]),
        ([layer(pop=["a"])], ["0 pops 'a', which no layer before it stashes"]),
        (
            [layer(pop=["a"]), layer(["a"])],
            ["0 pops 'a', which no layer before it stashes"],
        ),
        (
            [layer(["a"]), layer(["a"]), layer(pop=["a"])],
            ["1 stashes 'a', which 0 has stashed before"],
        ),
        (
            [layer(["a"]), nn.Sequential(layer(pop=["a"])), layer(pop=["a"])],
            ["2 pops 'a', which 1.0 has popped before"],
        ),
        (
            [layer(["a"]), layer(["a", "b"]), layer(pop=["c"])],
            [
                "1 stashes 'a', which 0 has stashed before",
                "2 pops 'c', which no layer before it stashes",
                "0 stashes 'a', which no layer pops",
                "1 stashes 'b', which no layer pops",
            ],
        ),
    ],
)
def test_every_fault_is_listed(layers, faults):
    with pytest.raises(TypeError) as caught:
        verify_skippables(nn.Sequential(*layers))
    first, *lines = str(caught.value).split("\n")
    assert f"faults: {len(faults)}" in first
    assert lines == [f"- {fault}" for fault in faults]


def closed(name="a"):
    return nn.Sequential(layer([name]), nn.ReLU(), layer(pop=[name]))


BLOCK = closed()


@pytest.mark.parametrize(
    "layers",
    [
        [closed(), closed()],
        [closed(), nn.ReLU(), copy.deepcopy(BLOCK), copy.deepcopy(BLOCK)],
        [BLOCK, BLOCK],
        [nn.Sequential(closed(), closed()), closed()],
        [nn.Sequential(*closed(), *closed())],
        [nn.ModuleDict({"down": layer(pop=["a"]), "up": layer(["a"])}), closed()],
        [layer(["b"]), closed(), closed(), layer(pop=["b"])],
    ],
)
def test_closed_within_a_layer_may_repeat(layers):
    verify_skippables(nn.Sequential(*layers))
    for balance in ([len(layers)], [1] * len(layers)):
        found = layout(*layers, balance=balance)
        crossing = {skip for skips in found.stashed for skip in skips}
        assert crossing <= {B}


@pytest.mark.parametrize(
    ("layers", "faults"),
    [
        # Within one layer, the second would take the place of the first.
        (
            [nn.Sequential(layer(["a"]), layer(["a"]), layer(pop=["a"]), layer(pop=["a"]))],
            [
                "0.1 stashes 'a', which 0.0 has stashed before",
                "0.3 pops 'a', which 0.2 has popped before",
            ],
        ),
        # A block within the ends of a skip of the same name, beside it, and before it.
        (
            [layer(["a"]), closed(), layer(pop=["a"])],
            [
                "1.0 stashes 'a', which 0 has stashed before",
                "2 pops 'a', which 1.2 has popped before",
            ],
        ),
        (
            [closed(), closed(), layer(["a"]), layer(pop=["a"])],
            [
                "2 stashes 'a', which 0.0 has stashed before",
                "3 pops 'a', which 0.2 has popped before",
            ],
        ),
    ],
)
def test_what_is_closed_here_and_open_there(layers, faults):
    with pytest.raises(TypeError, match="namespaces") as caught:
        verify_skippables(nn.Sequential(*layers))
    assert str(caught.value).split("\n")[1:] == [f"- {fault}" for fault in faults]


# Layers that yield, without the decorator.


class Forgotten(nn.Module):
    def forward(self, input):
        yield stash("a", input)
        return input


@skippable(stash=["a"])
class Decorated(Forgotten):
    pass


class Derived(Decorated):
    def forward(self, input):
        yield stash("a", input)
        return input


@pytest.mark.parametrize("kind", [Forgotten, Derived])
@pytest.mark.parametrize("other", [nn.Identity(), layer(pop=["a"])], ids=["neither", "one"])
@pytest.mark.parametrize("nested", [False, True])
def test_forgotten_decorator(kind, other, nested):
    module = nn.Sequential(nn.ReLU(), nn.Sequential(kind()) if nested else kind(), other)
    path = "1.0" if nested else "1"
    fault = rf"- {path} \({kind.__name__}\) yields in forward, and .* not decorated with @skippable"
    with pytest.raises(TypeError, match=fault):
        GPipe(module, [3], devices=["cpu"])


def test_decorated_layers_and_inner_generators_are_none():
    """A skippable layer may run a generator of its own."""

    @skippable(stash=["a"])
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Forgotten()

        def forward(self, input):
            return (yield from self.inner(input))

    verify_skippables(
        nn.Sequential(
            Outer(),
            Decorated().isolate(ns := Namespace()),
            layer(pop=["a"]),
            layer(pop=["a"]).isolate(ns),
        )
    )
