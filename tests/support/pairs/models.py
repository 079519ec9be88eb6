"""Models that pairs of processes train, their batches, and a step compared with one process."""

import torch
from torch import distributed, nn
from torch.testing import assert_close

from torchgpipe.skip import pop, skippable, stash

RANKS, STEPS = 2, 2
#: Of two partitions.
PLACES = ["cpu"] * 2
#: Several buckets of gradients, even for tiny models.
TINY = 1e-5


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        yield stash("skip", x)
        return x.tanh()


@skippable(pop=["skip"])
class Pop(nn.Linear):
    def forward(self, x):
        skip = yield pop("skip")
        return super().forward(x) + skip


class PartlyUsed(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.unused = nn.Parameter(torch.ones(3))


class Reduced(torch.autograd.Function):
    """The sum over processes."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return Reduced.apply(grad)


class Centred(nn.Module):
    """A norm that communicates in forward and in backward, as nn.SyncBatchNorm does."""

    alone = False

    def forward(self, x):
        if self.alone:
            return (x - x.mean(0)).tanh()
        return (x - Reduced.apply(x.sum(0)) / (RANKS * len(x))).tanh()


def plain():
    hidden = (layer for _ in range(2) for layer in (nn.Tanh(), nn.Linear(4, 4)))
    return nn.Sequential(nn.Linear(4, 4), *hidden, nn.GELU())


def skips():
    return nn.Sequential(Stash(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), Pop(4, 4), nn.GELU())


def unused():
    layers = plain()
    layers[0], layers[4] = PartlyUsed(4, 4), PartlyUsed(4, 4)
    return layers


def tied():
    layers = plain()
    layers[2].weight = layers[0].weight
    layers[4].weight = layers[0].weight
    return layers


def dropout():
    layers = plain()
    layers[1], layers[3] = nn.Dropout(0.4), nn.Dropout(0.4)
    return layers


def norms():
    layers = plain()
    layers[1], layers[5] = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    return layers


def blocks():
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(4)]
    )


def batch(rows=8):
    """The whole batch, the same in each process."""
    return torch.randn(rows, 4, dtype=torch.double)


def part(x, rank):
    return x.chunk(RANKS)[rank]


def loss(output):
    return output.square().mean()


def assert_gradients(model, reference, **close):
    for one, other in zip(model.parameters(), reference.parameters()):
        if other.grad is None:
            assert one.grad is None or not one.grad.any()
        else:
            assert_close(one.grad, other.grad, **close)


def train(rank, model, reference, batches=1, whole=loss):
    """Take steps with both models, and compare gradients and weights."""
    optimizers = [torch.optim.SGD(x.parameters(), 0.1) for x in (model, reference)]
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for k in range(1, batches + 1):
            x = batch()
            if k < batches:
                with model.no_sync():
                    loss(model(part(x, rank))).backward()
            else:
                loss(model(part(x, rank))).backward()
            whole(reference(x)).backward()
        assert_gradients(model, reference)
        for optimizer in optimizers:
            optimizer.step()
