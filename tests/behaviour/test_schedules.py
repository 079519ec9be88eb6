"""Any schedule computes what the micro-batches give one after another."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.schedules import Case, compare
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.skip import pop, skippable, stash


def doubled(grad):
    return None if grad is None else grad * 2


class HookedNode(nn.Linear):
    """A hook that changes what a node computes, of this layer or of the one before."""

    def forward(self, x):
        y = super().forward(x)
        y.grad_fn.register_hook(lambda grads, _: tuple(map(doubled, grads)))
        return y


@pytest.mark.parametrize("name", ["zbh1", "dualpipe_v"])
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


@skippable(stash=["value"])
class Stashed(nn.Linear):
    def forward(self, x):
        yield stash("value", super().forward(x))


@skippable(pop=["value"])
class Popped(nn.Module):
    def forward(self, x):
        assert x is None
        return (yield pop("value")) * 2


@pytest.mark.parametrize("stages", ["eager", "graph"])
def test_outputs_without_tensors(stages):
    """A stage may return None, and hand on all that it computes as a skip."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), Stashed(6, 6), nn.Identity(), Popped()]
    for name in ("zbh1", "dualpipe_v"):
        case = Case(layers, torch.rand(5, 6), torch.rand(5, 6), 2)
        compare(case, name, ["cpu"] * 4, "always", stages=stages)
