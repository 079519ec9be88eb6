"""Graph stages run what was traced: changes that they see, and changes after which to retrace."""

import copy
from contextvars import ContextVar
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.support.graphs import traced_in
from tests.support.helpers import assert_graphs
from torchgpipe import GPipe, ScheduledLoss

NUMBER = 1.0
CONFIG = SimpleNamespace(scale=1.0)
VARIABLE = ContextVar("VARIABLE", default=1.0)


def helper(x):
    return x * CONFIG.scale


def closed(scale):
    def read(own, x):
        return x * scale[0]

    return read


class Layer(nn.Module):
    shared = 1.0

    def __init__(self, read=lambda own, x: x):
        super().__init__()
        self.a, self.b, self.read = nn.Linear(3, 3), nn.Linear(3, 3), read
        self.drop = nn.Dropout(0.0)
        self.scale, self.flag, self.name = 1.0, False, "relu"
        self.pair, self.sizes = (1.0, (1.0,)), [1.0, 2.0]
        self.table = {"deep": [1.0, CONFIG], "config": CONFIG}
        self.config = SimpleNamespace(scale=1.0)
        self.factor = torch.tensor(1.0)
        self.kept = [torch.tensor(1.0)]
        self.a.weight.scale = 1.0
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        return self.read(self, self.drop(self.b(self.a(x)))) * self.mean


def training_of(layer, loss=F.mse_loss, schedule="1f1b", **options):
    model = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2, checkpoint="never")
    return ScheduledLoss(model, loss, schedule, stages="graph", **options)


def results(layer, compute, x, target):
    """The loss and all gradients."""
    layer.zero_grad()
    torch.manual_seed(0)
    loss = compute(x, target)
    loss.backward()
    return [loss.detach(), *[p.grad for p in layer.parameters() if p.requires_grad]]


def compare(training, layer, x, loss=F.mse_loss):
    """Compare a step with that of the plain layer."""
    found = results(layer, training, x, x)
    expected = results(layer, lambda x, y: loss(layer(x), y), x, x)
    torch.testing.assert_close(found, expected)
    return expected[0]


def attribute(name, value):
    return lambda layer: setattr(layer, name, value)


def freeze(layer):
    layer.a.weight.requires_grad_(False)


def replace(layer):
    layer.b = nn.Sequential(nn.Tanh(), nn.Linear(3, 3))


def grow(layer):
    layer.b.register_module("more", nn.Linear(3, 3))
    layer.b.forward = lambda x: layer.b.more(x)


def cut(layer):
    layer.b.bias = None


def tie(layer):
    layer.b.weight = layer.a.weight


class Shouting(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


def other_class(layer):
    layer.b.__class__ = Shouting


#: How a layer reads something, and a change of it that is seen.
SEEN = {
    "number": (lambda own, x: x * own.scale, attribute("scale", 3.0)),
    "number of a module of PyTorch": (lambda own, x: x, lambda x: setattr(x.drop, "p", 1.0)),
    "flag": (lambda own, x: x * 3 if own.flag else x, attribute("flag", True)),
    "text": (lambda own, x: getattr(torch, own.name)(x), attribute("name", "tanh")),
    "nothing": (lambda own, x: x if own.name else x * 3, attribute("name", None)),
    "type of a number": (lambda own, x: x if own.flag is False else x * 3, attribute("flag", 0)),
    "tuple": (lambda own, x: x * own.pair[0], attribute("pair", (3.0, (1.0,)))),
    "tuple of tuples": (lambda own, x: x * own.pair[1][0], attribute("pair", (1.0, (3.0,)))),
    "list": (lambda own, x: x * own.sizes[0], lambda x: x.sizes.__setitem__(0, 3.0)),
    "list that is replaced": (lambda own, x: x * own.sizes[0], attribute("sizes", [3.0])),
    "type in a list": (
        lambda own, x: x * 3 if own.sizes[0] is True else x,
        lambda x: x.sizes.__setitem__(0, True),
    ),
    "list that is longer": (lambda own, x: x * len(own.sizes), lambda x: x.sizes.append(1.0)),
    "dict": (lambda own, x: x * own.table.get("new", 1.0), lambda x: x.table.update(new=3.0)),
    "other object in a list": (
        lambda own, x: x * own.table["deep"][-1].scale,
        lambda x: x.table["deep"].__setitem__(-1, SimpleNamespace(scale=3.0)),
    ),
    "list in a dict": (
        lambda own, x: x * own.table["deep"][0],
        lambda x: x.table["deep"].__setitem__(0, 3.0),
    ),
    "new attribute": (lambda own, x: x * getattr(own, "new", 1.0), attribute("new", 3.0)),
    "attribute that is gone": (
        lambda own, x: x * (1.0 if hasattr(own, "scale") else 3.0),
        lambda x: delattr(x, "scale"),
    ),
    "other object": (
        lambda own, x: x * own.config.scale,
        attribute("config", SimpleNamespace(scale=3.0)),
    ),
    "value of a tensor": (lambda own, x: x * own.factor, lambda x: x.factor.fill_(3.0)),
    "other tensor": (lambda own, x: x * own.factor, attribute("factor", torch.tensor(3.0))),
    "value of a buffer": (lambda own, x: x, lambda x: x.mean.fill_(3.0)),
    "other weight": (
        lambda own, x: x,
        lambda x: setattr(x.a, "weight", nn.Parameter(torch.eye(3))),
    ),
    "frozen": (lambda own, x: x, freeze),
    "no bias": (lambda own, x: x, cut),
    "tied weights": (lambda own, x: x, tie),
    "other module": (lambda own, x: x, replace),
    "more modules": (lambda own, x: x, grow),
    "other class": (lambda own, x: x, other_class),
    "weight norm": (lambda own, x: x, lambda x: parametrizations.weight_norm(x.b)),
    "mode": (lambda own, x: x * 3 if own.drop.training else x, lambda x: x.drop.eval()),
}


@pytest.mark.parametrize("name", SEEN)
def test_changes_of_layers_are_seen(name):
    torch.manual_seed(0)
    read, change = SEEN[name]
    layer, x = Layer(read), torch.randn(4, 3)
    training = training_of(layer)
    compare(training, layer, x)
    assert_graphs(training)
    first = training.graphs[0].last
    compare(training, layer, x)
    # Nothing has changed.
    assert training.graphs[0].last is first
    change(layer)
    for _ in range(2):
        compare(training, layer, x)
    assert_graphs(training)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer.b, "weight", 0.5),
        lambda layer: layer.b.register_forward_hook(lambda own, args, x: x * 3),
    ],
)
def test_hooks_that_come_later_keep_a_stage_eager(change):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 3)
    training = training_of(layer)
    compare(training, layer, x)
    change(layer)
    with pytest.warns(UserWarning, match="its modules have hooks"):
        compare(training, layer, x)
    compare(training, layer, x)


def test_gradients_of_frozen_weights_come_back():
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 3)
    training = training_of(layer, schedule="zbh1")
    for needed in (True, False, True):
        layer.a.requires_grad_(needed)
        compare(training, layer, x)
    assert_graphs(training)
    # The graph of the first state was kept.
    assert [len(traced_in(x)) for x in training.graphs[0].states] == [1, 1]


def set_number(layer):
    globals()["NUMBER"] = 3.0


def set_config(layer):
    CONFIG.scale = 3.0


SCALES = [1.0]

#: How a layer reads something, and a change of it that is not seen.
UNSEEN = {
    "object": (lambda own, x: x * own.config.scale, lambda x: setattr(x.config, "scale", 3.0)),
    "object in a dict": (lambda own, x: x * own.table["config"].scale, set_config),
    "global": (lambda own, x: x * NUMBER, set_number),
    "global of a helper": (lambda own, x: helper(x), set_config),
    "closure": (closed(SCALES), lambda layer: SCALES.__setitem__(0, 3.0)),
    "class": (lambda own, x: x * own.shared, lambda layer: setattr(Layer, "shared", 3.0)),
    "context variable": (lambda own, x: x * VARIABLE.get(), lambda layer: VARIABLE.set(3.0)),
    "attribute of a weight": (
        lambda own, x: x * own.a.weight.scale,
        lambda x: setattr(x.a.weight, "scale", 3.0),
    ),
}


@pytest.fixture
def _fresh(monkeypatch):
    """Reset what layers read elsewhere."""
    monkeypatch.setitem(globals(), "NUMBER", 1.0)
    monkeypatch.setattr(CONFIG, "scale", 1.0)
    monkeypatch.setattr(Layer, "shared", 1.0)
    SCALES[:] = [1.0]
    token = VARIABLE.set(1.0)
    yield
    VARIABLE.reset(token)


#: Eager halves of a backward cannot be those of a convolution, nor are parts of them compiled.
WAYS = {
    "whole": {"schedule": "1f1b"},
    "halves": {"schedule": "zbh1"},
    "compiled": {"schedule": "zbh1", "compile": "aot_eager"},
}


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", UNSEEN)
def test_what_must_stay_and_retrace(name, way):
    torch.manual_seed(0)
    read, change = UNSEEN[name]
    layer, x = Layer(read), torch.randn(4, 3)
    training = training_of(layer, **WAYS[way])
    compare(training, layer, x)
    before = results(layer, training, x, x)
    change(layer)
    # What was traced is what runs.
    torch.testing.assert_close(results(layer, training, x, x), before)
    training.retrace()
    for _ in range(2):
        assert not torch.allclose(compare(training, layer, x), before[0])
    assert_graphs(training)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_what_a_loss_reads_and_retrace(stages):
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(4, 3)

    def loss(output, target):
        return F.mse_loss(output, target) * NUMBER

    training = training_of(layer, loss)
    training.stages = stages
    compare(training, layer, x, loss)
    set_number(layer)
    training.retrace()
    compare(training, layer, x, loss)
    assert bool(training.graphs) == (stages == "graph")


def test_retrace_says_once_more_why_a_stage_is_eager():
    layer, x = Layer(lambda own, x: x * own.kept[0]), torch.randn(4, 3)
    training = training_of(layer)
    for _ in range(2):
        # Tensors in lists are no arguments of a graph.
        with pytest.warns(UserWarning, match="not among its parameters"):
            compare(training, layer, x)
        layer.kept[0].fill_(3.0)
        compare(training, layer, x)
        training.retrace()
    layer.read = lambda own, x: x * own.factor
    compare(training, layer, x)
    assert_graphs(training)


def count(own, x):
    own.scale += 1
    return x


def count_in_list(own, x):
    own.sizes[0] += 1
    return x


def keep(own, x):
    own.last = x.detach()
    return x


def keep_in_dict(own, x):
    own.table["deep"].append(x.detach())
    return x


@pytest.mark.parametrize("write", [count, count_in_list, keep, keep_in_dict])
def test_what_forward_writes_keeps_a_stage_eager(write):
    torch.manual_seed(0)
    layer, x = Layer(write), torch.randn(4, 3)
    plain = copy.deepcopy(layer)
    training = training_of(layer)
    with pytest.warns(UserWarning, match="attributes"):
        training(x, x)
    for half in x.chunk(2):
        plain(half)
    for name in ("scale", "sizes", "table", "last"):
        a, b = (str(getattr(own, name, None)) for own in (layer, plain))
        assert name == "table" or a == b
    # Nothing of the attempt is left.
    assert [*map(type, layer.table["deep"])] == [*map(type, plain.table["deep"])]
