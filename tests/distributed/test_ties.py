"""Weights of several processes, which a layer, the loss, or a replica has, too."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.test_schedules import pipe_of
from tests.support.schedules import linear, relu
from torchgpipe.distributed import Pipe


class Table(nn.Module):
    """A layer with a weight that is not contiguous, if wanted."""

    def __init__(self, weight=None, strided=False):
        super().__init__()
        made = torch.rand(6, 6).t() if strided else torch.rand(6, 6)
        self.weight = nn.Parameter(made) if weight is None else weight

    def forward(self, x):
        return x @ self.weight


class TableLoss(nn.Module):
    """A loss with the weight of a layer, as a linear cross entropy has that of the embedding."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, output, target):
        return F.mse_loss(output @ self.weight.t(), target)


def beside_plain(group, kind):
    torch.manual_seed(0)
    table = Table(strided=kind == "strided")
    layers = [table, relu(), relu(), linear() if kind == "loss" else Table(table.weight)]
    loss = TableLoss(table.weight) if kind == "loss" else F.mse_loss
    plain, plain_loss = copy.deepcopy((layers, loss))
    pipe = pipe_of(layers, "1f1b", group, loss=loss, chunks=2)
    if kind == "frozen in one" and pipe.is_first:
        table.weight.requires_grad_(False)
    x, y = torch.rand(2, 4, 6)
    found = pipe.step(x, y)
    expected = plain_loss(nn.Sequential(*plain)(x), y)
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    grad = plain[0].weight.grad
    for name, weight in pipe.named_parameters():
        if name.endswith("weight") and weight.shape == (6, 6) and name[0] in "03l":
            if not weight.requires_grad:
                assert weight.grad is None
            elif kind == "frozen in one":
                assert weight.grad is not None
            elif not (kind == "loss" and name.startswith("3")):
                torch.testing.assert_close(weight.grad, grad)


class Idle(nn.Module):
    """A layer that uses its weight or not."""

    def __init__(self, weight, used=False):
        super().__init__()
        self.weight, self.used = weight, used

    def forward(self, x):
        return x @ self.weight if self.used else x


@pytest.mark.parametrize("kind", ["loss", "strided", "frozen in one"])
def test_weights_of_two_processes(kind, processes):
    processes.run(beside_plain, 4, kind)


class Hidden(nn.Module):
    """A layer that uses a weight of another one, which nobody finds among its parameters."""

    def __init__(self, layer):
        super().__init__()
        self.layers = [layer]

    def forward(self, x):
        return x @ self.layers[0].weight.t()


def hidden(group):
    first = linear()
    pipe = pipe_of([first, Hidden(first)], "1f1b", group)
    with pytest.raises(RuntimeError, match="must not use a weight of a layer in another process"):
        pipe.step(*torch.rand(2, 4, 6))


def test_a_weight_that_nobody_finds(processes):
    processes.run(hidden, 2)
    processes.stop()


def replicas(group, kind):
    rank = torch.distributed.get_rank(group)
    groups = [torch.distributed.new_group(x) for x in ([0, 1], [2, 3], [0, 2], [1, 3])]
    torch.manual_seed(rank // 2)
    layers = [nn.Sequential(linear(), nn.BatchNorm1d(6)) for _ in range(2)]
    pipe = Pipe(
        nn.Sequential(*layers),
        [1, 1],
        loss=F.mse_loss,
        group=groups[rank // 2],
        replicas=groups[2 + rank % 2],
    )
    if kind == "frozen":
        # As many weights of the same shapes, but others.
        layers[rank % 2][rank // 2].requires_grad_(False)
        with pytest.raises((ValueError, RuntimeError), match="the same of them frozen"):
            pipe.step(*torch.rand(2, 4, 6))
        return None
    pipe.step(*torch.rand(2, 4, 6))
    return [(x.detach(), x.grad) for x in pipe.parameters()]


def test_replicas_begin_with_the_same_weights(processes):
    found = processes.run(replicas, 4, "begin")
    for k in range(2):
        for (one, grad), (other, its) in zip(found[k], found[2 + k]):
            assert torch.equal(one, other)
            assert torch.equal(grad, its)


def test_replicas_that_train_different_weights(processes):
    processes.run(replicas, 4, "frozen")
    processes.stop()


def test_a_layer_with_the_name_of_the_loss(processes):
    processes.run(named_loss, 2)


def named_loss(group):
    layers = nn.Sequential()
    layers.add_module("loss", linear())
    layers.add_module("other", linear())
    with pytest.raises(ValueError, match="name that the loss has"):
        Pipe(layers, [1, 1], group=group, loss=F.mse_loss)


def loading(group):
    loss = TableLoss(nn.Parameter(torch.rand(6, 6)))
    layers = [linear(), linear()]
    whole = {**nn.Sequential(*layers).state_dict(), "loss.weight": torch.zeros(6, 6)}
    pipe = pipe_of(layers, "1f1b", group, loss=loss)
    pipe.load_state_dict(whole)
    if pipe.is_last:
        assert not pipe.loss.weight.any()


def test_whole_state_dict_with_a_loss(processes):
    processes.run(loading, 2)


def idle(group):
    rank = torch.distributed.get_rank(group)
    groups = [torch.distributed.new_group(x) for x in ([0, 1], [2, 3], [0, 2], [1, 3])]
    options = {"loss": F.mse_loss, "group": groups[rank // 2], "replicas": groups[2 + rank % 2]}
    tied, half, own = [nn.Parameter(torch.rand(6, 6)) for _ in range(3)]
    layers = [linear(), Idle(tied), Idle(own), Idle(half, used=rank < 2), Idle(tied), Idle(half)]
    pipe = Pipe(nn.Sequential(*layers), [4, 2], **options)
    pipe.step(*torch.rand(2, 4, 6))
    return {name: x.grad is None for name, x in pipe.named_parameters()}


def test_weights_without_a_gradient_in_any_process(processes):
    found = processes.run(idle, 4)
    assert [{name for name, none in x.items() if none} for x in found] == [
        {"1.weight", "2.weight"},
        {"4.weight"},
    ] * 2
