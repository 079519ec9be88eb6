"""Any schedule computes what the micro-batches give one after another."""

import re
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.functional import mse_loss

from tests.support.helpers import notes_of
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


class Checkpointed(nn.Module):
    """A layer with a checkpoint of PyTorch within."""

    def __init__(self, **options):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 6))
        self.options = options

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers, x, **self.options) + x


def keep_products(_, operator, *args, **kwargs):
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    policy = torch.utils.checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE


SELECTIVE = {
    "use_reentrant": False,
    "context_fn": partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, keep_products
    ),
}


# From PyTorch 2.14 on, it warns unless told what policies do with hooks for saved tensors.
@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@pytest.mark.parametrize("name", ["1f1b", "zbh1", "dualpipe_v"])
def test_selective_checkpoints_of_layers(name, mode):
    torch.manual_seed(0)
    x, y = torch.rand(8, 6), torch.rand(8, 6)
    layers = [nn.Sequential(nn.Linear(6, 6), Checkpointed(**SELECTIVE)) for _ in range(4)]
    compare(Case(layers, x, y), name, ["cpu"] * 4, mode)


@pytest.mark.parametrize("name", ["1f1b", "zbh1"])
def test_reentrant_checkpoints_of_layers_are_an_error(name):
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Checkpointed(use_reentrant=True))
    step = ScheduledLoss(GPipe(layers, [1, 2], devices=["cpu"] * 2, chunks=2), mse_loss, name)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="set use_reentrant=False") as caught:
            step(torch.rand(4, 6), torch.rand(4, 6))
        assert re.match(r"raised in 1[BI]0 on worker 1", notes_of(caught.value)[0])
    layers[2].options = {"use_reentrant": False}
    step(torch.rand(4, 6), torch.rand(4, 6)).backward()


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
