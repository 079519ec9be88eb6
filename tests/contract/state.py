"""Parameters, buffers and their state, and what changes them between steps."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.contract.promises import Otherwise, promise
from tests.contract.wrapped import assert_same_grads, linears, plain_step


def norms(seed=0):
    """Layers with parameters, buffers, and a layer that has neither."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))


def same_state(found, expected):
    """Compare two state dicts."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key].to(value.device), value, msg=key)


def verify_steps(model, layers, count=1, buffers=True):
    """Check that a model and the plain layers do the same in a step, micro-batch by micro-batch."""
    for _ in range(count):
        x, y = torch.rand(2, 8, 4, dtype=next(layers.parameters()).dtype)
        layers.zero_grad()
        model.zero_grad()
        expected = plain_step(layers, x, y, chunks=4)
        torch.testing.assert_close(model.step(x.to(model.first), y.to(model.last)).cpu(), expected)
        assert_same_grads(model, layers)
        if buffers:
            same_state(model.buffers, dict(layers.named_buffers()))


@promise("The model loads the state dict of the plain layers, and these load the model's.")
def both_ways(make):
    source, target = norms(1), norms(2)
    model = make(norms())
    for assign in (False, True):
        model.pipe.load_state_dict({k: v.clone() for k, v in source.state_dict().items()})
        same_state(model.state, source.state_dict())
        target.load_state_dict(model.state, assign=assign)
        same_state(target.state_dict(), source.state_dict())
        source = norms(3)
    own = model.pipe.state_dict()
    model.pipe.load_state_dict(own)
    verify_steps(model, target)


@promise("So it does as a part of a parent, and with assign=True.")
def parents(make):
    source, model = norms(1), make(norms())
    state = nn.ModuleDict({"head": nn.Linear(1, 1), "body": source}).state_dict()
    parent = nn.ModuleDict({"head": nn.Linear(1, 1), "body": model.pipe})
    for assign in (False, True):
        state = {key: value.clone() + assign for key, value in state.items()}
        assert parent.load_state_dict(state, assign=assign) == ([], [])
        expected = {k[5:]: v for k, v in state.items() if k.startswith("body.")}
        same_state(model.state, expected)
    source.load_state_dict(expected)
    verify_steps(model, source)


@promise("Keys that are missing, and keys of no layer, are errors, or are told if not strict.")
def strict(make):
    model, state = make(norms()), norms(1).state_dict()
    for layer in ("0", "3"):
        del state[f"{layer}.weight"]
        state[f"{layer}.other"] = torch.ones(1)
    state["9.weight"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r'Missing key.*[03]\.weight(.|\n)*"9\.weight"'):
        model.pipe.load_state_dict(dict(state))
    missing, unexpected = model.pipe.load_state_dict(dict(state), strict=False)
    assert {x[-8:] for x in model.all(missing)} == {"0.weight", "3.weight"}
    assert {x[-7:] for x in model.all(unexpected)} == {".weight", "0.other", "3.other"}


class Versioned(nn.Linear):
    """A layer that learns which version it loads."""

    _version = 7
    loaded = None

    def _load_from_state_dict(self, state, prefix, metadata, *args):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *args)


@promise("Layers learn the version of what they load, from the plain layers and from a model.")
def versions(make):
    model, plain = make(nn.Sequential(*[Versioned(2, 2) for _ in range(3)])), Versioned(2, 2)
    plain = nn.Sequential(*[Versioned(2, 2) for _ in range(3)])
    for state in (plain.state_dict(), model.pipe.state_dict()):
        keys = [*state._metadata]
        model.pipe.load_state_dict(state)
        found = [x for x in model.pipe.modules() if isinstance(x, Versioned)]
        assert {x.loaded for x in found} == {7}
        assert [*state._metadata] == keys
        for layer in found:
            layer.loaded = None


def _data(layers):
    for parameter in layers.parameters():
        parameter.data = parameter.data * 1.5 + 0.1


def _in_place(layers):
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(1.5)


def _loaded(layers):
    layers.load_state_dict({k: v * 0.5 for k, v in layers.state_dict().items()}, assign=True)


def _frozen(layers):
    layers[0].requires_grad_(False)
    layers[3].weight.requires_grad_(False)


def _all_but_the_last_frozen(layers):
    layers[:-1].requires_grad_(False)


def _unfrozen(layers):
    layers.requires_grad_(True)


def _replaced(layers):
    for layer in (layers[0], layers[3]):
        layer.weight = nn.Parameter(layer.weight.detach() * 2)


def _removed(layers):
    layers[0].bias = None


def _added(layers):
    layers[0].bias = nn.Parameter(torch.full((4,), 0.5))


def _one_in_eval(layers):
    layers[1].eval()


def _one_in_train(layers):
    layers[1].train()


def _buffers(layers):
    layers[1].running_mean = layers[1].running_mean + 1
    layers[1].running_var.fill_(2.0)


def _momentum(layers):
    layers[1].momentum = 0.5


CHANGES = (_data, _in_place, _loaded, _frozen, _all_but_the_last_frozen, _unfrozen, _replaced)
CHANGES += (_removed, _added, _one_in_eval, _buffers, _one_in_train, _momentum)


@promise(
    "Between steps parameters may change, in place and by .data, be loaded, frozen, replaced, "
    "removed and added, and so may buffers, modes and numbers of a layer.",
    modes=True,
)
def changes(make):
    plain = norms()
    model = make(plain)
    verify_steps(model, plain, 3)
    for change in CHANGES:
        change(plain)
        change(model.layers)
        verify_steps(model, plain, 2)


@promise("A layer within a layer may be replaced between steps.", modes=True)
def replaced(make):
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
    model = make(plain)
    verify_steps(model, plain, 3)
    for k in range(2):
        plain[k][1] = nn.BatchNorm1d(4)
        model.layers[k][1] = copy.deepcopy(plain[k][1]).to((model.first, model.last)[k])
        verify_steps(model, plain, 2)


class Extra(nn.Module):
    """A layer that returns another value while it trains, whose other end takes either."""

    def __init__(self, back):
        super().__init__()
        self.layer, self.back = nn.Linear(4, 4), back

    def forward(self, x):
        if self.back:
            return self.layer(x[0] if isinstance(x, tuple) else x)
        x = self.layer(x)
        return (x, 2 * x) if self.training else x


@promise("What passes between layers may have another form, or dtype, in the next step.")
def forms(make):
    plain = nn.Sequential(nn.Linear(4, 4), Extra(False), Extra(True), nn.Linear(4, 4))
    model = make(plain)
    verify_steps(model, plain, 2)
    for training in (False, True):
        for layers in (plain, model.layers):
            layers[1].train(training)
        verify_steps(model, plain, 2)
    for layers in (plain, model.layers):
        layers.double()
    verify_steps(model, plain, 2)


@promise("A model may be wrapped without memory, on the meta device. What nobody loads shows.")
def meta(make):
    source = norms(1)
    with torch.device("meta"):
        model = make(norms())
    assert all(x.isnan().all() for x in model.model.parameters())
    model.pipe.load_state_dict(source.state_dict())
    verify_steps(model, source)


OPTIMIZERS = (
    lambda x: torch.optim.SGD(x, 0.1, momentum=0.9, foreach=True),
    lambda x: torch.optim.SGD(x, 0.1, momentum=0.9, fused=True),
    lambda x: torch.optim.AdamW(x, 0.1, fused=True),
    lambda x: torch.optim.AdamW(x, 0.1, foreach=True, amsgrad=True),
    lambda x: torch.optim.Adafactor(x, 0.1),
)


@promise("Any optimizer trains the parameters, in one call for each or for all.", devices=True)
def optimizers(make):
    for choice in OPTIMIZERS:
        plain = linears(4, 4, 4)
        model = make(plain)
        pair = choice(plain.parameters()), choice(model.model.parameters())
        for _ in range(3):
            verify_steps(model, plain)
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        for key, value in model.state.items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[key])


@promise(
    "The state of an optimizer goes by the order of the layers, from the plain ones and back.",
    otherwise={
        "Pipe": Otherwise(
            "A process has the state of its own parameters, which go by their names: see "
            "torch.distributed.checkpoint.",
            "doesn't match the size",
        )
    },
)
def optimizer_state(make):
    plain = linears(4, 4, 4)
    model = make(plain)
    pair = [torch.optim.AdamW(x.parameters(), 0.1) for x in (plain, model.model)]
    verify_steps(model, plain)
    pair[0].step()
    for source, target in (pair, pair[::-1]):
        target.load_state_dict(copy.deepcopy(source.state_dict()))
        model.pipe.load_state_dict(plain.state_dict())
        for _ in range(2):
            verify_steps(model, plain)
            for optimizer in pair:
                optimizer.step()
        same_state(model.state, plain.state_dict())


@promise("Moving averages of a model are those of the plain layers, and predict.")
def averages(make):
    plain = norms()
    model = make(plain)
    pair = plain, model.model
    means = [AveragedModel(x, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for x in pair]
    for _ in range(2):
        verify_steps(model, plain)
        for average, source in zip(means, pair):
            with torch.no_grad():
                for parameter in source.parameters():
                    parameter.mul_(0.5)
            average.update_parameters(source)
    expected = means[0].module.eval()
    twin = model.twin(lambda _: means[1].module).train(False)
    same_state(twin.state, expected.state_dict())
    x = torch.rand(4, 4)
    torch.testing.assert_close(twin.forward(x.to(model.first)), expected(x))


@promise("Weights may be normed, or parametrised otherwise.", modes=True)
def parametrised(make):
    plain = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    parametrizations.weight_norm(plain[0])
    parametrizations.spectral_norm(plain[1])
    parametrizations.orthogonal(plain[3])
    model = make(plain)
    verify_steps(model, plain, 3)


@promise("Weights may be pruned, and that may be made permanent.", modes=True)
def pruned(make):
    plain = linears(4, 4, 4)
    model = make(plain)
    for layers in (plain, model.layers):
        for k in (0, 2):
            prune.l1_unstructured(layers[k], "weight", amount=0.5)
    with model.warned() as found:
        verify_steps(model, plain, 3)
    # By hooks, which no graph has.
    assert (len(found) > 0) == (make.wrapper == "ScheduledLoss of graphs")
    assert all("its modules have hooks" in x for x in found)
    for layers in (plain, model.layers):
        prune.remove(layers[0], "weight")
        prune.remove(layers[2], "weight")
    verify_steps(model, plain, 2)
