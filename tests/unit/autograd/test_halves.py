"""Both halves of backward together are the whole of it, and W does what I has left."""

import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe.autograd.fork_join import Unpack, get_phony
from torchgpipe.autograd.halves import Halves, backward, leaves

CPU = torch.device("cpu")


class Product(torch.autograd.Function):
    """A function that computes all its gradients or none."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        Product.runs += 1
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class InPython(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6, 6))

    def forward(self, x):
        return Product.apply(x, self.weight * 2)


class Beside(nn.Module):
    """Weights that hang on no input, weights that do twice, and weights without a use."""

    def __init__(self):
        super().__init__()
        self.weight, self.alone = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) * self.weight + self.linear(self.alone) + self.linear(x.detach())


class Hooked(nn.Module):
    """A hook that changes a gradient, of a tensor that a weight was applied to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 3)
        return y


def doubled(grads, _):
    return tuple(None if grad is None else grad * 2 for grad in grads)


class HookedNode(nn.Module):
    """A hook that changes what a node computes; another weight shares what leads to its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.rand(6, 6)), nn.Parameter(torch.rand(6, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        weight = self.weight * self.scale
        weight.register_hook(self.called)
        x = nn.functional.linear(self.linear(x) @ self.weight, weight.t())
        y = x @ self.weight
        y.grad_fn.register_hook(doubled)
        return self.linear(y).relu()

    def called(self, grad):
        self.calls = getattr(self, "calls", 0) + 1
        return grad * 3


class HookedModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.linear.register_backward_hook(lambda _, *grads: doubled(*grads))

    def forward(self, x):
        return self.linear(x)


class Computed(nn.Module):
    """A weight that somebody has computed."""

    def __init__(self):
        super().__init__()
        self.made_of = nn.Parameter(torch.rand(6, 6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(x) @ self.computed

    def weights(self):
        self.computed = self.made_of.exp()
        return [*self.linear.parameters(), self.computed]


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.linear(x).clone()
        x[:, :2] = self.linear.bias[:2]
        return x.view(-1, 2, 3).flatten(1)


def deep(*layers):
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6), nn.Sigmoid())


LAYERS = {
    "linear": nn.Linear(6, 6),
    "deep": deep(nn.GELU(), nn.LayerNorm(6)),
    "without weights": nn.Sequential(nn.Tanh(), nn.Dropout(0.0)),
    "in Python": deep(InPython(), nn.Tanh(), InPython()),
    "beside": deep(Beside()),
    "hooked": deep(Hooked(), Hooked()),
    "hooked node": deep(HookedNode(), nn.Tanh(), HookedNode()),
    "hooked module": deep(HookedModule(), HookedModule()),
    "in place": deep(nn.ReLU(inplace=True), Masked()),
    "frozen": deep(nn.Linear(6, 6).requires_grad_(False)),
    "computed": Computed(),
    "twice": nn.Sequential(*[nn.Linear(6, 6)] * 3),
    "broadcast": nn.Sequential(nn.PReLU(), nn.Softmax(-1), nn.PReLU(6)),
    "batch norm": deep(nn.BatchNorm1d(6)),
}


def entered(x):
    """A tensor at the beginning of a graph, and the edge of its gradient."""
    (y,) = Unpack.apply(get_phony(CPU, requires_grad=True), x)
    return y, get_gradient_edge(y)


def weights_of(layer):
    found = layer.weights() if isinstance(layer, Computed) else layer.parameters()
    return [x for x in found if x.requires_grad]


def halves(layer, x, grad, needs_input=True):
    weights = weights_of(layer)
    input, edge = entered(x) if needs_input else (x, None)
    root = get_gradient_edge(layer(input))
    found = Halves([root], [grad], [edge] if needs_input else [], weights)
    inputs = found.input()
    result = found.weight()
    return inputs, [result[id(x)] for x in weights]


def whole(layer, x, grad, needs_input=True):
    weights = weights_of(layer)
    input, edge = entered(x) if needs_input else (x, None)
    root = get_gradient_edge(layer(input))
    edges = [edge] if needs_input else []
    found = backward([root], [grad], [*edges, *weights])
    return found[: len(edges)], found[len(edges) :]


def same(found, expected):
    assert len(found) == len(expected)
    for own, other in zip(found, expected):
        assert (own is None) == (other is None)
        if own is not None:
            assert own.shape == other.shape
            torch.testing.assert_close(own, other)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_two_halves_are_the_whole(name, needs_input):
    torch.manual_seed(0)
    layer = LAYERS[name]
    if not needs_input and not weights_of(layer):
        pytest.skip("nothing requires a gradient")
    x, grad = torch.rand(4, 6), torch.rand(4, 6)
    inputs, weights = halves(layer, x, grad, needs_input)
    expected = whole(layer, x, grad, needs_input)
    same(inputs, expected[0])
    same(weights, expected[1])
    if not isinstance(layer, Computed):
        assert all(x.grad is None for x in layer.parameters())


def test_hooks_of_nodes_run_once_with_all_gradients():
    calls = []

    class Watched(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.grad_fn.register_hook(lambda grads, _: calls.append([x is None for x in grads]))
            return y

    halves(deep(Watched(6, 6)), torch.rand(4, 6), torch.rand(4, 6))
    assert calls == [[False] * 3]
    layer = HookedNode()
    halves(layer, torch.rand(4, 6), torch.rand(4, 6))
    assert layer.calls == 1


def test_work_is_not_done_twice():
    """The matrices that I multiplies are those for the input, and W those for the weights."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    layer, x, grad = LAYERS["deep"], torch.rand(4, 6), torch.rand(4, 6)
    input, edge = entered(x)
    found = Halves([get_gradient_edge(layer(input))], [grad], [edge], list(layer.parameters()))
    for half in (found.input, found.weight):
        with Count() as mode:
            mode.count = 0
            half()
        assert mode.count == 2


def test_what_only_the_input_needed_is_let_go_of():
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved = x * 2
            alive.append(weakref.ref(saved))
            ctx.save_for_backward(saved)
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            return grad * (saved > -9)

    class Layer(nn.Module):
        def forward(self, x):
            return Kept.apply(x)

    alive = []
    layer = deep(Layer())
    input, edge = entered(torch.rand(4, 6))
    weights = list(layer.parameters())
    found = Halves([get_gradient_edge(layer(input))], [torch.rand(4, 6)], [edge], weights)
    del input, edge
    assert alive[0]() is not None
    found.input()
    assert alive[0]() is None
    assert all(grad is not None for grad in found.weight().values())


def test_numbers_are_let_go_of_within_a_mode():
    """PyTorch has crashed where a node that has saved a number was told of hooks."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    layer, x = nn.Linear(4, 4), torch.rand(2, 4, requires_grad=True)
    with Mode():
        y = layer(x.clone()) * 2
        edges = [get_gradient_edge(z) for z in (y, x)]
        halves = Halves(edges[:1], [torch.ones_like(y)], edges[1:], [*layer.parameters()])
        (found,) = halves.input()
        halves.weight()
    assert torch.allclose(found, 2 * layer.weight.sum(0).expand(2, 4))


def test_weight_that_is_not_among_the_weights():
    layer, stray = nn.Linear(6, 6), nn.Parameter(torch.rand(6))
    input, edge = entered(torch.rand(4, 6))
    root = get_gradient_edge(layer(input) * stray)
    nodes = set()
    for _ in range(2):
        found = leaves([root], edge.node, list(layer.parameters()), nodes)
        assert [id(x) for x in found] == [id(stray)]
        assert nodes == {get_gradient_edge(x).node for x in layer.parameters()}
    found = Halves([root], [torch.ones(4, 6)], [edge], list(layer.parameters()))
    found.input()
    assert found.weight()[id(stray)] is not None


def test_deep_graph():
    x, edge = entered(torch.rand(2))
    weight = nn.Parameter(torch.rand(2))
    y = x
    for _ in range(5000):
        y = y + weight
    found = Halves([get_gradient_edge(y)], [torch.ones(2)], [edge], [weight])
    found.input()
    assert torch.equal(found.weight()[id(weight)], torch.full((2,), 5000.0))
