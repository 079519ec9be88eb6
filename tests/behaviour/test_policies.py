"""Policies of PyTorch's, and layers that differ in their two runs, or refuse hooks."""

import copy
import enum
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tests.support.helpers import Apply, wrap
from torchgpipe import MappedGPipe, Offload, ScheduledLoss, keep

aten = torch.ops.aten


def policy(*operators):
    """A policy that keeps the results of some operators; of all if none is named."""

    def choose(context, operator, *args, **kwargs):
        kept = not operators or operator in operators
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, choose)


POLICIES = {"all": policy(), "products": policy(aten.addmm.default, aten.mul.Tensor)}


def of_gpipe(layers, mode, **options):
    return wrap(layers, ["cpu"] * 2, mode, 4, **options)


def of_schedule(layers, mode, **options):
    return ScheduledLoss(of_gpipe(layers, mode, **options), squares)


def of_map(layers, mode, **options):
    where = dict.fromkeys(layers._modules, "cpu")
    return MappedGPipe(layers, where, chunks=4, checkpoint=mode, **options)


def squares(y):
    return y.pow(2).mean()


WRAPPERS = {"GPipe": of_gpipe, "ScheduledLoss": of_schedule, "MappedGPipe": of_map}


def trained(wrapper, layers, mode, **options):
    """Gradients and buffers after two steps."""
    model = WRAPPERS[wrapper](copy.deepcopy(layers), mode, **options)
    for k in range(2):
        model.zero_grad()
        torch.manual_seed(k)
        y = model(torch.rand(16, 4))
        (y if isinstance(model, ScheduledLoss) else squares(y)).backward()
    return [*[x.grad for x in model.parameters()], *model.buffers()]


def products():
    """A layer whose products have numbers that those of a norm would change."""
    return Apply(lambda x: (x * x).sin() * x)


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_norms_that_are_deferred(wrapper, kind):
    """Norms that are deferred compute moments in the first run alone."""
    norms = [nn.Linear(4, 4), nn.BatchNorm1d(4), products()]
    layers = nn.Sequential(*norms, *copy.deepcopy(norms))
    expected = trained(wrapper, layers, "never", deferred_batch_norm=True)
    try:
        found = trained(wrapper, layers, POLICIES[kind], deferred_batch_norm=True)
    except RuntimeError as error:
        pytest.fail(str(error))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_values_that_layers_keep(wrapper, kind):
    keeping = [nn.Linear(4, 4), Apply(lambda x: keep(x.sin()) * x), products()]
    layers = nn.Sequential(*keeping, *copy.deepcopy(keeping))
    expected = trained(wrapper, layers, "never")
    found = trained(wrapper, layers, POLICIES[kind])
    assert all(map(torch.equal, found, expected))


def changing(x):
    """Use what has been changed in place, and not what that returns."""
    y = x * 2
    y.mul_(3)
    return y.sin()


def drawing(x):
    y, _ = torch.native_dropout(x.sin(), 0.5, train=True)
    return (y * torch.rand_like(y)).cos()


#: What operators do besides returning a result: for each a layer, and the operators.
MORE = {
    "changes": (lambda: Apply(changing), [aten.mul_.Tensor]),
    "statistics": (lambda: nn.BatchNorm1d(4), [aten.add_.Tensor, aten.addmm.default]),
    "draws": (lambda: Apply(drawing), [aten.native_dropout.default]),
}


@pytest.mark.parametrize("kind", MORE)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_operators_that_do_more_than_to_return_are_computed_again(wrapper, kind):
    """Else a recomputation would find other values in what they change, or draw other numbers."""
    torch.manual_seed(0)
    make, operators = MORE[kind]
    layers = nn.Sequential(*[x for _ in range(4) for x in (nn.Linear(4, 4), make())])
    expected = trained(wrapper, layers, "never")
    try:
        found = trained(wrapper, layers, policy(*operators))
    except RuntimeError as error:
        pytest.fail(str(error))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_casts_of_weights(wrapper, around):
    """Autocast keeps weights that it has cast, from one micro-batch to the next."""
    linear = nn.Linear(4, 4)
    layers = nn.Sequential(linear, nn.Tanh(), nn.Sequential(linear, nn.Tanh()), nn.Linear(4, 4))
    options = {} if wrapper == "MappedGPipe" else {"balance": [3, 1]}
    found = []
    for mode in ("always", POLICIES["products"]):
        model = WRAPPERS[wrapper](copy.deepcopy(layers), mode, **options)
        torch.manual_seed(0)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(torch.rand(16, 4))
                loss = y if wrapper == "ScheduledLoss" else squares(y)
                if around:
                    loss.backward()
            if not around:
                loss.backward()
        except RuntimeError as error:
            pytest.fail(str(error))
        found.append([x.grad for x in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("mode", ["always", POLICIES["all"]], ids=["always", "policy"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_layers_that_take_no_hooks(wrapper, mode):
    layer = Apply(torch.func.grad(lambda x: (x.sin() * x).sum()))
    layers = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4), nn.Tanh())
    trained(wrapper, layers, "never")
    with pytest.raises(RuntimeError, match=r"take no hooks .*use checkpoint='never'"):
        trained(wrapper, layers, mode)


class Words(str, enum.Enum):
    OFFLOAD = "offload"

    def __str__(self):
        return self.value


@pytest.mark.parametrize(
    "mode",
    [
        *("offload", Words.OFFLOAD, Offload(), Offload(share=0.5), POLICIES["all"]),
        *(["never", "offload"], [POLICIES["products"], "always"], [Offload(), "never"]),
    ],
    ids=str,
)
def test_stages_that_are_graphs_refuse_what_they_cannot_do(mode):
    """However a mode comes, and whatever graphs are for, the message says what to use."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused = partial(
        pytest.raises,
        ValueError,
        match=r"a stage that is a graph keeps all .*(checkpoint: .*); use stages='eager', or "
        r"checkpoint='always'",
    )
    with refused():
        ScheduledLoss(wrap(layers, ["cpu"] * 2, mode, 4), squares, stages="graph")
    late = ScheduledLoss(wrap(layers, ["cpu"] * 2, "never", 4), squares, stages="graph")
    late.model.checkpoint = mode
    eager = ScheduledLoss(wrap(layers, ["cpu"] * 2, mode, 4), squares)
    eager(torch.rand(16, 4)).backward()
    eager.stages = "graph"
    for step in (late, eager):
        with refused():
            step(torch.rand(16, 4))
        with refused():
            step.costs(torch.rand(16, 4))
        with refused():
            step.schedule = "zbh1"
