"""Operators that draw are seen, and draw from another generator than the default one."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe._torch import draws, names
from torchgpipe.ambient import generators
from torchgpipe.ambient.generators import Own

X = torch.rand(6, 8)

#: What draws, on the CPU.
DRAWING = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "feature dropout": lambda: F.dropout1d(X[None], 0.5, True),
    "feature alpha dropout": lambda: F.feature_alpha_dropout(X[None], 0.5, True),
    "native dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "rrelu": lambda: F.rrelu(-X, training=True),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
    "LSTM": lambda: nn.LSTM(8, 8, 2, dropout=0.5)(X)[0].detach(),
    "gumbel": lambda: F.gumbel_softmax(X),
    "rand": lambda: torch.rand(3),
    "rand, double": lambda: torch.rand(3, dtype=torch.double),
    "out": lambda: torch.rand(3, out=torch.empty(3)),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(99, (5,)),
    "randperm": lambda: torch.randperm(99),
    "like": lambda: torch.cat([torch.rand_like(X), torch.randn_like(X), torch.randint_like(X, 9)]),
    "bernoulli": lambda: torch.bernoulli(X),
    "multinomial": lambda: torch.multinomial(X, 3),
    "normal": lambda: torch.normal(X, X),
    "normal of numbers": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal of one number": lambda: torch.normal(0.0, X),
    "poisson": lambda: torch.poisson(X),
    "binomial": lambda: torch.binomial(9 * X, X),
    "gamma": lambda: torch.distributions.Gamma(X + 1, X + 1).sample(),
    "Dirichlet": lambda: torch.distributions.Dirichlet(X + 1).sample(),
    "in place": lambda: [getattr(X.clone(), f"{name}_")() for name in IN_PLACE][-1],
    "geometric": lambda: X.clone().geometric_(0.5),
    "default": lambda: torch.rand(3, generator=torch.default_generator),
    "half": lambda: F.dropout(X.bfloat16(), 0.5),
    "vmap": lambda: torch.vmap(lambda x: F.dropout(x, 0.5), randomness="different")(X),
}
IN_PLACE = ("uniform", "normal", "exponential", "cauchy", "log_normal", "random")


@pytest.fixture
def default():
    """Check that the default generator is left alone."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def draw(function, own):
    """Call a function whose draws have a generator of their own."""
    assert generators.can_see_draws()
    generators.nesting.source = own
    try:
        with generators.seeing_draws(True):
            return function()
    finally:
        generators.nesting.source = None


def expected(function, seed):
    """Call a function; return its result, and the default generator's state after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return function(), torch.get_rng_state()


def own_of(seed):
    return Own(torch.Generator().manual_seed(seed).get_state())


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", DRAWING)
def test_numbers_of_a_generator_of_its_own(name, within):
    def function():
        if within and name != "vmap":
            with Mode():
                return DRAWING[name]()
        return DRAWING[name]()

    own = own_of(5)
    found = draw(function, own)
    value, state = expected(DRAWING[name], 5)
    assert torch.equal(found, value)
    assert torch.equal(own.get_state(), state)


def test_all_operators_that_draw_are_among_those_tested():
    """None has appeared that draws from the CPU's generator, and has none among its arguments."""
    known = {
        *("_cudnn", "miopen", "_lstm_mps", "_triton", "_flash", "_efficient", "_fill_mem_eff"),
        *("_scaled_dot_product", "_fused_sdp_choice", "_nested_tensor_softmax"),
    }
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if name == schema.name or "generator" in [x.name for x in schema.arguments]:
            continue
        if name in draws.MAKERS or name.startswith(tuple(known)):
            continue
        operator = getattr(getattr(torch.ops.aten, name), schema.overload_name or "default", None)
        if operator is None or torch.Tag.nondeterministic_seeded not in operator.tags:
            continue
        # It is made of others, above all modes.
        assert torch._C._dispatch_has_kernel_for_dispatch_key(
            operator.name(), "CompositeImplicitAutograd"
        ), operator


@pytest.mark.usefixtures("default")
def test_generator_of_a_layer_is_left_alone():
    own = own_of(5)
    found = draw(lambda: torch.rand(3, generator=torch.Generator().manual_seed(7)), own)
    assert torch.equal(found, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(own.get_state(), own_of(5).get_state())


class Unused:
    """A source that nobody should draw from."""

    def begin(self):
        pytest.fail("drawn from the CPU's")


def test_tensors_elsewhere_are_filled_by_a_generator_of_their_device():
    draw(lambda: torch.rand(3, device="meta"), Unused())
    draw(lambda: F.dropout(X.to("meta")), Unused())


@pytest.mark.usefixtures("default")
def test_draws_of_a_backward():
    class Draw(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return torch.rand(grad.shape)

    x = torch.ones(3, requires_grad=True)
    (found,) = draw(lambda: torch.autograd.grad(Draw.apply(x).sum(), x), own_of(5))
    assert torch.equal(found, expected(lambda: torch.rand(3), 5)[0])


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_what_is_traced_has_no_generator(tracing_mode):
    own = own_of(5)
    graph = draw(
        lambda: make_fx(lambda x: F.dropout(x, 0.5), tracing_mode=tracing_mode)(X), own
    ).graph
    assert all("generator" not in node.kwargs for node in graph.nodes)


def test_operators_of_higher_order():
    product = torch.ops.higher_order.out_dtype
    x = torch.ones(2, 2, dtype=torch.int8)
    args = (torch.ops.aten.mm.default, torch.int32, x, x)
    assert torch.equal(draw(lambda: product(*args), own_of(5)), product(*args))


@pytest.mark.parametrize(
    "name", [name for name, x in names.NAMES.items() if x.feature == "random numbers beside others"]
)
def test_without_a_name_nothing_is_seen(name, monkeypatch):
    gone = names.NAMES[name]._replace(path="torch:that_is_gone")
    monkeypatch.setitem(names.NAMES, name, gone)
    assert not draws.can_see.__wrapped__(Own)


def test_a_key_that_somebody_else_has():
    assert not draws.can_see.__wrapped__(Own)
    assert draw(lambda: torch.rand(3), own_of(5)).equal(expected(lambda: torch.rand(3), 5)[0])
