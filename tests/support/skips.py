"""A layer that stashes, and one that pops what it has stashed."""

from torch import nn

from torchgpipe.skip import pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Module):
    """A layer that stashes something else than it returns."""

    def forward(self, x):
        yield stash("skip", x * 2)
        return x * 3


@skippable(pop=["skip"])
class Pop(nn.Module):
    """A layer that adds what it pops."""

    def forward(self, x):
        return x + (yield pop("skip"))
