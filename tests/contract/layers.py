"""Layers: frozen, tied, in place, with skips."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.contract.comparing import assert_as_plain, mean_of_squares, moved
from tests.contract.promises import POLICY, Otherwise, promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step
from tests.support.helpers import Apply
from tests.support.in_place import ENDS, FLAGGED, VIEWS, out_of_place
from tests.support.size import SOAK
from tests.support.structures import rows
from torchgpipe import is_recomputing
from torchgpipe.skip import pop, skippable, stash


@promise(
    "Layers that require no gradient get none, wherever they are, and pass on those of others.",
    modes=True,
)
def frozen(make):
    for some in make.some([[0, 2], [0], [3], [1, 2], [0, 1], [2, 3], [0, 1, 2]]):
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)])
        for k in some:
            layers[k].requires_grad_(False)
        assert_as_plain(make, layers, rows(4, requires_grad=False))
    layers.requires_grad_(False)
    model = make(layers, loss=mean_of_squares, chunks=2)
    x, given = rows(4), rows(4)
    given.data = x.data.clone()
    plain_step(layers, x, loss=mean_of_squares)
    model.step(given)
    torch.testing.assert_close(model.input_grads([given]), [x.grad])


#: Layers with a flag that are not PyTorch's, or hold one that is.
OWN = ("within", "one's own", "an item")


class Counted(nn.Module):
    """A layer that counts its recomputations."""

    def __init__(self, log, name):
        super().__init__()
        self.layers, self.log, self.name = linears(3, 3), log, name

    def forward(self, x):
        if is_recomputing():
            self.log.append(self.name)
        return self.layers(x)


@promise(
    "Frozen layers in front of all that trains are not computed again.",
    eager=True,
)
def frozen_in_front(make):
    log = []
    layers = nn.Sequential(*[Counted(log, k) for k in range(4)])
    layers[0].requires_grad_(False)
    layers[1].requires_grad_(False)
    model = make(layers, loss=mean_of_squares, mode="always")
    own = [model.layers[k] for k in range(4)]
    for layer in own:
        layer.log = log
    model.step(rows(8, requires_grad=False))
    assert sorted(model.all(log)) == [2] * 4 + [3] * 4


@promise("Layers need no parameters, all but one of them.", modes=True)
def without_parameters(make):
    few = [nn.Flatten(), nn.Tanh(), nn.Identity(), nn.Linear(6, 3), nn.Softplus(), nn.ReLU()]
    assert_as_plain(make, nn.Sequential(*few), torch.rand(5, 2, 3))
    assert_as_plain(make, nn.Sequential(*few[3:], *few[:3]), torch.rand(5, 6))


@promise("Parameters that a step does not use get no gradient.", modes=True)
def unused_parameters(make):
    layers = linears(3, 3, 3)
    for layer in layers:
        layer.more = nn.Linear(3, 3)
    assert_as_plain(make, layers, rows(4))


class Decoder(nn.Module):
    """A layer that computes with the weight of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x):
        return F.linear(x, self.weight)


def language_model():
    """Layers of which the first and the last share a weight, as do two inner ones."""
    embedding, one, two = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(embedding, one, nn.Tanh(), two, Decoder(embedding)).double()


def reused():
    """A block that comes three times, as in a universal transformer, and its activation."""
    block, act = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.GELU()
    return nn.Sequential(nn.Embedding(7, 4), block, act, block, act, block, nn.Tanh()).double()


@promise(
    "Parameters that layers of one device share, and layers that come twice, train as in the plain "
    "model, over steps of an optimizer.",
    modes=True,
)
def tied(make):
    for made in make.some([language_model, reused]):
        layers, words = made(), torch.randint(7, (8,))
        model = make(layers, loss=mean_of_squares)
        optimizers = [torch.optim.Adam(x.parameters(), 0.1) for x in (layers, model.model)]
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected = plain_step(layers, words, loss=mean_of_squares)
            torch.testing.assert_close(model.step(words), expected)
            assert_same_grads(model, layers)
            for optimizer in optimizers:
                optimizer.step()


@promise(
    "A batch norm that comes twice counts what both places have seen.",
    modes=True,
    otherwise={
        "Pipe": Otherwise(
            "each process would have statistics of its own: an error says so",
            "a norm with running statistics must be in one process",
        )
    },
)
def norm_in_two_places(make):
    norm, x = nn.BatchNorm1d(4), torch.rand(8, 4)
    layers = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh(), norm, nn.Linear(4, 3))
    model = make(layers, loss=mean_of_squares)
    for _ in range(2):
        expected = plain_step(layers, x, loss=mean_of_squares, chunks=4)
        torch.testing.assert_close(model.step(x), expected)
    assert_same_grads(model, layers)
    assert model.buffers["1.num_batches_tracked"] == 16


# In place.


@promise(
    "Activations of PyTorch with inplace=True may stand anywhere, also where a device begins.",
    modes=True,
    devices=True,
)
def told_in_place(make):
    for start in (nn.ReLU(inplace=True), nn.Sequential(nn.SiLU(inplace=True), nn.Tanh())):
        layers = nn.Sequential(nn.Linear(3, 3), Apply(torch.sin), start, nn.Linear(3, 3))
        assert_as_plain(make, layers, rows(4))


@promise(
    "So may custom layers that have an attribute inplace, which is True.",
    modes=True,
    eager=True,
)
def custom_in_place(make):
    # Those of PyTorch are told above.
    for name in FLAGGED if SOAK else OWN:
        layers = nn.Sequential(nn.Linear(3, 3), Apply(torch.sin), FLAGGED[name](), nn.Linear(3, 3))
        assert_as_plain(make, layers, rows(4))


@promise(
    "The caller's input stays as it is where the first layer has inplace=True, and the input may "
    "require a gradient.",
    modes=True,
    otherwise={
        "MappedGPipe": Otherwise(
            "the model's own code runs, and changes the input as the plain model does", "^changed"
        )
    },
)
def first_in_place(make):
    relu, within = nn.ReLU(inplace=True), nn.Sequential(nn.SiLU(inplace=True), nn.Tanh())
    leaf = torch.randn(4, 3, requires_grad=True)
    # The output of another model is no leaf.
    for start, x in ((relu, leaf.detach()), (within, leaf), (relu, leaf * 2)):
        layers = nn.Sequential(start, nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        before = x.detach().clone()
        reference, model = out_of_place(layers), make(layers, loss=mean_of_squares, chunks=2)
        expected = plain_step(reference, moved(x, "cpu"), loss=mean_of_squares)
        torch.testing.assert_close(model.step(x), expected)
        assert_same_grads(model, reference)
        assert torch.equal(x, before), "changed"


KEPT = Otherwise(
    "Under a policy, PyTorch does not let a result that is kept be changed in place.",
    "has been mutated",
)


@promise(
    "Layers may change in place what layers of their own device have made.",
    otherwise={POLICY: KEPT},
    modes=True,
    eager=True,
)
def own_in_place(make):
    layers = nn.Sequential(
        nn.Sequential(nn.Linear(3, 3), Apply(torch.tanh_)),
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Linear(3, 3), Apply(lambda x: (x[:, 1:].mul_(2), x)[1])),
        nn.Sequential(nn.Linear(3, 3), Apply(torch.sigmoid_)),
    )
    assert_as_plain(make, layers, rows(4))


@promise(
    "Under checkpointing, a layer that changes its input in place and has no flag is an error that "
    "names it, where a device begins.",
    fails=True,
)
def silent_in_place(make):
    # A view of the input goes through a layer first.
    second = nn.Flatten(), Apply(torch.tanh_), nn.Linear(3, 3)
    layers = nn.Sequential(nn.Linear(3, 3), Apply(torch.sin), *second)
    model = make(layers, loss=mean_of_squares, chunks=2, mode="always")
    error = model.raised(model.step, rows(4))
    assert error.kind == "RuntimeError"
    assert "must not change its input in place" in error.text
    assert "(layer: 3)" in error.text or "raised in 3 on cpu, micro-batch 0" in error.notes


@promise(
    "Views of any kind may leave a device, and the model.", otherwise={POLICY: KEPT}, modes=True
)
def views(make):
    for end in make.some([*ENDS.values(), *VIEWS.values()]):
        ends = [nn.Sequential(nn.Linear(3, 3), Apply(end)) for _ in range(2)]
        if end is not ENDS["detached"]:
            assert_as_plain(make, nn.Sequential(*ends), rows(4))


def several_views(x):
    a, b, c = x.unbind(1)
    return {"a": a, "b": [b, x[:, 1:]], "x": (x, x.t().t(), c)}


def of_several_views(value):
    rest = value["b"][1].sum(1) + (value["x"][0] * value["x"][1]).sum(1)
    return (value["a"] * value["b"][0] + rest) * value["x"][2]


@promise(
    "Several views of one tensor may pass between layers.",
    modes=True,
    eager=True,
)
def views_of_one_tensor(make):
    layers = nn.Sequential(nn.Linear(3, 3), Apply(several_views), Apply(of_several_views))
    assert_as_plain(make, nn.Sequential(*layers, nn.Identity()), rows(4))


# Skips.


@skippable(stash=["far"])
class Stash(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.layer, self.made = nn.Linear(3, 3), made

    def forward(self, x):
        y = self.layer(x)
        yield stash("far", self.made(y))
        return y.tanh()


@skippable(pop=["far"])
class Pop(nn.Module):
    def forward(self, x):
        far = yield pop("far")
        if isinstance(far, dict):
            far = far["x"][0] * far["n"]
        elif isinstance(far, tuple):
            far = far[0] * far[1]
        far = getattr(far, "n", far)
        return x if far is None else x + far


#: What is stashed.
SKIPS = {
    "tensor": lambda y: y.exp(),
    "output": lambda y: y,
    "view": lambda y: y[:, :1],
    "constant": lambda y: y.detach().exp(),
    "nested": lambda y: {"x": [y.exp(), None, y > 0], "n": 3},
    "none": lambda y: None,
    "number": lambda y: 7,
    # Equal to none that another micro-batch stashes.
    "object": lambda y: SimpleNamespace(n=7),
    "tuple": lambda y: (y.sin(), (y > 0).long()),
    "none, then a tensor": lambda y: y.sin() if len(y) == 2 else None,
}


@promise(
    "Skips go from a layer to a later one, on any device, as tensors, values or None.",
    otherwise={
        "MappedGPipe": Otherwise(
            "a checkpointed module of a map is computed again alone, without what others stash: "
            "an error says so",
            "stash and pop within one of them, or wrap the layers in a GPipe",
        )
    },
    devices=True,
)
def skips(make):
    for made in make.some(SKIPS.values()):
        for layers in (
            [Stash(made), nn.Tanh(), nn.Linear(3, 3), Pop()],
            [nn.Linear(3, 3), nn.Sequential(Stash(made), Pop()), nn.Tanh(), nn.Linear(3, 3)],
        ):
            assert_as_plain(make, nn.Sequential(*layers), rows(5))
