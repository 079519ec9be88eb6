"""Layers of all sorts, which take a tensor or a tuple of tensors, and compute with the first."""

import torch
from torch import nn

from tests.support.helpers import Apply
from torchgpipe.skip import pop, skippable, stash

#: The shape of a micro-batch.
ROWS, WIDTH = 2, 3


def tensors(value):
    return value if isinstance(value, tuple) else (value,)


def first(value):
    return tensors(value)[0]


def with_first(value, tensor):
    """Replace the first tensor of a value."""
    return (tensor, *value[1:]) if isinstance(value, tuple) else tensor


class First(nn.Module):
    """A layer for the first tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, value):
        return with_first(value, self.layer(first(value).double()))


class InPlace(nn.ReLU):
    """A layer that changes its input in place, and has the flag for it."""

    def __init__(self):
        super().__init__(inplace=True)

    def forward(self, value):
        return with_first(value, super().forward(first(value)))


class Shifted(nn.Module):
    """A parameter of the shape of a micro-batch: its gradient is that of the output, itself."""

    def __init__(self, all_of_them=False, twice=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(ROWS, WIDTH))
        self.all, self.twice = all_of_them, twice

    def forward(self, value):
        x = first(value)
        y = (x + self.weight) + x.tanh() if self.twice else x + self.weight
        rest = [t + self.weight if self.all else t for t in tensors(value)[1:]]
        return with_first((y, *rest) if rest else y, y)


def function(f):
    return lambda: Apply(lambda value: with_first(value, f(first(value))))


def appending(f):
    return lambda: Apply(lambda value: (*tensors(value), f(first(value))))


def layer_of_first(make):
    return lambda: First(make().double())


#: Layers in any order: each takes and returns a tensor, or a tuple.
LAYERS = {
    "linear": layer_of_first(lambda: nn.Linear(WIDTH, WIDTH)),
    "frozen": layer_of_first(lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
    "layer norm": layer_of_first(lambda: nn.LayerNorm(WIDTH)),
    "batch norm": layer_of_first(lambda: nn.BatchNorm1d(WIDTH)),
    "dropout": layer_of_first(lambda: nn.Dropout(0.4)),
    "relu": layer_of_first(nn.ReLU),
    "in place": InPlace,
    "shifted": Shifted,
    "shifted twice": lambda: Shifted(twice=True),
    "all shifted": lambda: Shifted(all_of_them=True),
    "tanh": function(torch.tanh),
    "identity": nn.Identity,
    "view": function(lambda x: x.unsqueeze(0).squeeze(0)),
    "halves": function(lambda x: torch.cat(x.split([1, WIDTH - 1], 1)[::-1], 1)),
    "transposed": function(lambda x: x.t().contiguous().t()),
    "expanded": function(lambda x: x.sum(1, keepdim=True).expand(-1, WIDTH)),
    "doubled": function(lambda x: x + x),
    "changed within": function(lambda x: (x * 1.0).mul_(0.5)),
    "stopped": function(lambda x: x.detach()),
    "pair": appending(lambda x: x * 2),
    "the same": appending(lambda x: x),
    "view beside": appending(lambda x: x[:, :]),
    "detached": appending(lambda x: x.detach()),
    "integers": appending(lambda x: (x > 0).long()),
    "sum": lambda: Apply(lambda value: sum(x.double() for x in tensors(value))),
    "first": lambda: Apply(first),
    "reversed": lambda: Apply(lambda x: x[::-1] if isinstance(x, tuple) else x),
}

#: Skips to stash, given the input of the layer, its output, and its parameter.
STASH = {
    "input": lambda x, y, p: x,
    "output": lambda x, y, p: y,
    "new": lambda x, y, p: x * p,
    "view": lambda x, y, p: y[:, 1:],
    "wide": lambda x, y, p: (x * p).repeat(1, 5),
    "scalar": lambda x, y, p: (x * p).sum(),
    "parameter": lambda x, y, p: p,
    "detached": lambda x, y, p: x.detach(),
    "integers": lambda x, y, p: (x > 0).long(),
    "empty": lambda x, y, p: x[:0] * p,
    "none": lambda x, y, p: None,
    "nested": lambda x, y, p: {"rest": [1, None, x > 0], "x": (x * p, "here")},
}

#: Uses of a value and a popped skip.
POP = {
    "add": lambda value, x: with_first(value, first(value) + x.double().sum()),
    "shift": lambda value, x: with_first(
        value, first(value) + x if x.shape == first(value).shape else first(value) * x.sum()
    ),
    "append": lambda value, x: (*tensors(value), x) if x.shape == (ROWS, WIDTH) else value,
    "replace": lambda value, x: with_first(value, x if x.shape == (ROWS, WIDTH) else first(value)),
    "ignore": lambda value, x: value,
}


def skip_layer(stashed=None, popped=None):
    """A layer that stashes and pops.

    Args:
        stashed: for each name, a kind of skip, of STASH.
        popped: for each name, a use of the skip, of POP.
    """
    stashed, popped = stashed or {}, popped or {}

    class SkipLayer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH).double() + 0.5)

        def forward(self, value):
            for name, way in popped.items():
                skip = yield pop(name)
                if isinstance(skip, dict):
                    skip = skip["x"][0]
                if skip is not None:
                    value = POP[way](value, skip)
            x = first(value)
            y = (x * self.weight).tanh()
            for name, way in stashed.items():
                yield stash(name, STASH[way](x, y, self.weight))
            return with_first(value, y)

        def extra_repr(self):
            return f"stashed={stashed}, popped={popped}"

    return skippable(stash=list(stashed), pop=list(popped))(SkipLayer)()
