"""Values that a recomputation gets from the first one, as the choices of a router."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.support.helpers import wrap
from torchgpipe import MappedGPipe, ScheduledLoss, is_recomputing, keep

M = 4


class Router(nn.Module):
    """A layer that sends rows to one of two experts, and chooses otherwise in a recomputation.

    So would a router whose scores are almost equal, and are added up in another order.
    """

    def __init__(self, how=keep):
        super().__init__()
        self.scores, self.how = nn.Linear(6, 2), how
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x):
        scores = self.scores(x).softmax(-1)
        chosen = scores.argmin(-1) if is_recomputing() else scores.argmax(-1)
        factor = (x * (1.5 if is_recomputing() else 1.0)).detach()
        found = self.how({"rows": chosen, "more": (factor, "text", None)})
        chosen, (factor, text, nothing) = found["rows"], found["more"]
        assert (text, nothing) == ("text", None)
        weight = scores.gather(-1, chosen[:, None]) * factor
        each = torch.stack([expert(x) for expert in self.experts])
        return each[chosen, torch.arange(len(x))] * weight


def layers(how=keep):
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Router(how), Router(how), nn.Linear(6, 6)]


def squares(y):
    return y.square().mean()


def of_gpipe(made, mode):
    return wrap(made, "cpu", mode, M, balance=[2, 2])


def of_schedule(made, mode):
    return ScheduledLoss(of_gpipe(made, mode), squares, "1f1b")


def of_map(made, mode):
    where = {str(k): "cpu" for k in range(4)}
    return MappedGPipe(nn.Sequential(*made), where, chunks=M, checkpoint=mode)


def grads(model):
    torch.manual_seed(1)
    y = model(torch.rand(8, 6))
    (y if isinstance(model, ScheduledLoss) else squares(y)).backward()
    return [x.grad for x in model.parameters()]


@pytest.mark.parametrize("make", [of_gpipe, of_schedule, of_map])
def test_recomputations_get_what_was_kept(make):
    expected = grads(make(layers(), "never"))
    for mode in ("always", "except_last"):
        assert all(map(torch.equal, grads(make(layers(), mode)), expected))
    # The router does choose otherwise.
    found = grads(make(layers(lambda value: value), "always"))
    assert not all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_keep_values_too():
    expected = grads(of_gpipe(layers(), "never"))
    made = layers()
    for layer in made:
        layer.compile(backend="eager")
    assert all(map(torch.equal, grads(of_gpipe(made, "always")), expected))


def in_graphs(made, mode, recompute, **options):
    """The gradients of a second step, whose stages are graphs, and the stages."""
    model = wrap(made, "cpu", mode, M, balance=[2, 2])
    step = ScheduledLoss(model, squares, "1f1b", stages="graph", recompute=recompute, **options)
    grads(step)
    step.zero_grad()
    return grads(step), step


class Choosing(nn.Module):
    """A layer whose kept values are of all sorts: of an operator with several results, and its own.

    A recomputation in which they were computed again could not be told from one that gets them.
    """

    def __init__(self, how=keep):
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x):
        values, places = (y := self.linear(x)).topk(3, -1)
        kept, (factor, text) = self.how((places, (y.exp(), "text")))
        assert text == "text"
        return (y.scatter(-1, kept, values * 2) * factor).tanh() + self.how(x)


@pytest.mark.parametrize("compile", [None, "eager"])
@pytest.mark.parametrize("recompute", ["everything", "min-cut"])
def test_graphs_keep_values_too(recompute, compile):
    def made(how=keep):
        torch.manual_seed(0)
        return [nn.Linear(6, 6), Choosing(how), Choosing(how), nn.Linear(6, 6)]

    plain = of_schedule(made(), "never")
    grads(plain)
    plain.zero_grad()
    expected = grads(plain)
    found, step = in_graphs(made(), "always", recompute, compile=compile)
    assert all(map(torch.equal, found, expected))
    for graphs in step.graphs:
        assert not graphs.reasons
        again = {x.name for x in graphs.last.parts.again.slice.nodes}
        kept = graphs.last.parts.joint.kept
        assert kept
        assert again.isdisjoint(x.name for x in kept)
    if recompute == "everything":
        _, without = in_graphs(made(lambda value: value), "always", recompute)
        for graphs, others in zip(step.graphs, without.graphs):
            again = graphs.last.parts.again.slice.nodes
            assert len(again) < len(others.last.parts.again.slice.nodes)


def test_a_graph_cannot_keep_what_it_changes():
    class Changing(nn.Module):
        def forward(self, x):
            y = keep(x * 2)
            return y.add_(1) + x.tanh()

    made = [nn.Linear(6, 6), Changing(), nn.Linear(6, 6), nn.Tanh()]
    with (
        pytest.warns(UserWarning, match="changes in place what it keeps"),
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        in_graphs(made, "always", "everything")


def test_nothing_is_kept_where_nothing_runs_twice():
    x = torch.rand(3)
    assert keep(x) is x
    value = {"a": [x, 1]}
    assert keep(value) is value


class Keeping(nn.Module):
    """A layer that keeps other values, or as many, in its two runs."""

    def __init__(self, first, second, change=False):
        super().__init__()
        self.first, self.second, self.change = first, second, change

    def forward(self, x):
        kept = None
        for value in self.second if is_recomputing() else self.first:
            kept = keep(value(x))
        if self.change and not is_recomputing():
            kept.add_(1)
        return x.tanh()


def one(x):
    return x.detach()[:1].clone()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        (Keeping([one], [one, one]), "must save the same tensors .*a further value that is kept"),
        (Keeping([one], [lambda x: one(x)[:, :2]]), r"recomputation: shape \(1, 2\)"),
        (Keeping([lambda _: "text"], [one]), "forward: str"),
    ],
)
def test_what_is_wrong_with_values(layer, match):
    model = of_gpipe([nn.Linear(6, 6), layer, nn.Linear(6, 6), copy.deepcopy(layer)], "always")
    with pytest.raises(RuntimeError, match=match):
        grads(model)


def test_a_changed_value_is_an_error():
    layers = [nn.Linear(6, 6), Keeping([one], [one], change=True), nn.Tanh(), nn.Linear(6, 6)]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grads(of_gpipe(layers, "always"))


@pytest.mark.parametrize("runs", [True, False])
def test_a_kept_value_is_let_go_of(runs):
    made = []

    def noted(x):
        made.append(weakref.ref(found := x.sin()))
        return found

    # Without weights nothing is dropped in the last partition.
    model = of_gpipe(
        [
            nn.Linear(6, 6),
            Keeping(
                [noted],
                [
                    one,
                ],
            ),
            nn.Identity(),
            nn.Identity(),
        ],
        "always",
    )
    y = model(torch.rand(8, 6))
    assert len(made) == M
    if runs:
        with pytest.raises(RuntimeError, match="must save"):
            squares(y).backward()
    del y
    gc.collect()
    assert [x() for x in made if x() is not None] == []
