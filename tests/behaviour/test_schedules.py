"""Any schedule computes what the micro-batches give one after another."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.helpers import MODES
from tests.support.schedules import CASES, NAMES, Case, compare
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.autograd import outcome
from torchgpipe.skip import pop, skippable, stash


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_buffers(case, name, mode):
    torch.manual_seed(0)
    compare(CASES[case](), name, ["cpu"] * 4, mode)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_added_at_once(monkeypatch, case, name):
    """Gradients of all sizes are added as soon as they are there, as large ones are."""
    monkeypatch.setattr(outcome, "LARGE", 0)
    model = compare(CASES[case](), name, ["cpu"] * 4, "except_last").model
    assert not any(x._backward_hooks for x in model.parameters())


def doubled(grad):
    return None if grad is None else grad * 2


class HookedNode(nn.Linear):
    """A hook that changes what a node computes, of this layer or of the one before."""

    def forward(self, x):
        y = super().forward(x)
        y.grad_fn.register_hook(lambda grads, _: tuple(map(doubled, grads)))
        return y


@pytest.mark.parametrize("name", ["zbh1", "dualpipe_v"])
@pytest.mark.parametrize("mode", MODES)
def test_hooks_that_change_what_nodes_compute(name, mode):
    torch.manual_seed(0)
    x, y = torch.rand(8, 6), torch.rand(8, 6)
    layers = [nn.Sequential(HookedNode(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(4)]
    compare(Case(layers, x, y), name, ["cpu"] * 4, mode)


def test_hook_that_another_layer_registers():
    """The loss may do so, when the forward of the cell is over."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    layers[1].register_forward_hook(lambda layer, _, y: setattr(layer, "output", y))

    def loss(output, target):
        layers[1].output.grad_fn.register_hook(lambda grads, _: tuple(2 * x for x in grads))
        return nn.functional.mse_loss(output, target)

    x, y = torch.rand(8, 6), torch.rand(8, 6)
    loss(layers(x), y).backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    ScheduledLoss(GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=1), loss, "zbh1")(
        x, y
    ).backward()
    for p, grad in zip(layers.parameters(), expected):
        torch.testing.assert_close(p.grad, grad)


class Thing:
    """An object that is equal to itself alone."""

    def __init__(self, number):
        self.number = number


#: Values of skips by the number of rows of a micro-batch, which has three or two.
VALUES = {
    "none": lambda x: None,
    "number": lambda x: 7,
    "object": lambda x: Thing(7),
    "nested": lambda x: {"a": [1, None], "b": ("x", ())},
    "none, then a tensor": lambda x: x.sin() if len(x) == 2 else None,
    "a tensor, then none": lambda x: x.sin() if len(x) == 3 else None,
}


@skippable(stash=["value"])
class Stashed(nn.Module):
    def __init__(self, kind, returns):
        super().__init__()
        self.layer, self.kind, self.returns = nn.Linear(6, 6), kind, returns

    def forward(self, x):
        y = self.layer(x)
        yield stash("value", y if self.returns is None else VALUES[self.kind](y))
        return self.returns and y


@skippable(pop=["value"])
class Popped(nn.Module):
    def forward(self, x):
        value = yield pop("value")
        x = value if x is None else x
        return x * 2 + value if isinstance(value, torch.Tensor) else x * 2


def skipping(kind):
    """Cases with a skip from the first stage to the last, to the next, and within one."""
    x, y = torch.rand(5, 6), torch.rand(5, 6)
    ends, inner = (Stashed(kind, True), Popped()), [nn.Linear(6, 6), nn.Linear(6, 6)]
    for layers in (
        [ends[0], *inner, ends[1]],
        [*inner, *ends],
        [*inner, nn.Sequential(*ends), nn.Linear(6, 6)],
    ):
        yield Case(layers, x, y, 2)


@pytest.mark.parametrize("stages", ["eager", "graph"])
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", VALUES)
def test_skips_without_tensors(kind, name, stages):
    torch.manual_seed(0)
    for case in skipping(kind):
        compare(case, name, ["cpu"] * 4, "always", stages=stages)


@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_outputs_without_tensors(stages):
    """A stage may return None, and hand on all that it computes as a skip."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Stashed("", None), nn.Identity(), Popped()]
    for name in ("zbh1", "dualpipe_v"):
        case = Case(layers, torch.rand(5, 6), torch.rand(5, 6), 2)
        compare(case, name, ["cpu"] * 4, "always", stages=stages)
