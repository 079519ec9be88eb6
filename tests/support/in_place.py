"""Layers that change tensors in place, and a comparison with the plain model that counts errors."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import Apply, plain, wrap

CHANGED_INPUT = "under checkpointing, a partition must not change its input in place"


CASES = pytest.mark.parametrize(
    ("chunks", "mode"),
    [(1, "never"), (2, "never"), (2, "except_last"), (2, "always")],
)


class Flagged(Apply):
    """A custom layer with a flag ``inplace``, like PyTorch's own."""

    def __init__(self, function, inplace=True):
        super().__init__(function)
        self.inplace = inplace

    def forward(self, value):
        if not self.inplace:
            value = value.clone()
        return super().forward(value)


class Double(nn.Module):
    """A layer that changes one item of a structure in place, and has the flag."""

    inplace = True

    def __init__(self, key):
        super().__init__()
        self.key = key

    def forward(self, value):
        x = value[self.key].mul_(2) if self.inplace else value[self.key] * 2
        value = dict(value) if isinstance(value, dict) else list(value)
        value[self.key] = x
        return value


def set_item(x):
    x[:, 0] = 0
    return x


#: Layers with a flag for their change of the input.
FLAGGED = {
    "relu": lambda: nn.ReLU(inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "within": lambda: nn.Sequential(nn.Sequential(nn.LeakyReLU(inplace=True)), nn.Tanh()),
    "one's own": lambda: Flagged(torch.tanh_),
    "an item": lambda: Flagged(set_item),
}


#: Functions that change their input and have no flag.
SILENT = {
    "tanh_": torch.tanh_,
    "and computes": lambda x: x.mul_(2).sin(),
    "a view": lambda x: (x[:, 1:].mul_(2), x)[1],
    "detached": lambda x: (x.detach().mul_(2), x.cos())[1],
    "its shape": lambda x: x.unsqueeze_(1).flatten(1),
}


#: Functions at the end of a partition, of a tensor of its own.
ENDS = {
    "new": torch.sin,
    "saved": torch.sigmoid,
    "in place": torch.tanh_,
    "view": lambda x: x.unsqueeze(0).squeeze(0),
    "detached": torch.detach,
}


#: Views at the end of a partition.
VIEWS = {
    "part": lambda x: torch.cat([x, x], 1)[:, 1:4],
    "of a split": lambda x: torch.cat([x, x], 1).split(3, 1)[1],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x.sum(1, keepdim=True).expand(-1, 3),
    "itself": lambda x: x,
}


def out_of_place(module):
    module = copy.deepcopy(module)
    for layer in module.modules():
        if getattr(layer, "inplace", False):
            layer.inplace = False
    return module


def leaf(requires_grad, rows=4):
    return torch.randn(rows, 3, requires_grad=requires_grad)


def is_checkpointed(mode, chunks):
    """Whether any micro-batch is checkpointed."""
    return mode == "always" or (mode == "except_last" and chunks > 1)


def outcome(run, leaves):
    """The output and the gradients, or the message of the error without shapes."""
    try:
        output = run()
        wanted = [x for x in leaves if x.requires_grad]
        if not output.requires_grad:
            return output, ()
        loss = output.square().sum()
        return output, torch.autograd.grad(loss, wanted, allow_unused=True)
    except RuntimeError as error:
        return str(error).split("[")[0]


def verify(found, expected):
    if isinstance(found, str) or isinstance(expected, str):
        assert found == expected
        return
    assert torch.equal(found[0], expected[0])
    assert found[0].requires_grad == expected[0].requires_grad
    for a, b in zip(found[1], expected[1]):
        torch.testing.assert_close(a, b)


def outcomes(module, balance, chunks, mode, x, reference=None):
    """Outcomes of a wrapper and of the plain module, and the input of each."""
    reference = copy.deepcopy(reference or module)
    wrapped = wrap(copy.deepcopy(module), mode=mode, chunks=chunks, balance=balance)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for _ in range(2)]
    found = outcome(lambda: wrapped(given[0]), [given[0], *wrapped.parameters()])
    expected = outcome(
        lambda: plain(reference, given[1], chunks), [given[1], *reference.parameters()]
    )
    return found, expected, *given


def verify_unless_checkpointed(found, expected, chunks, mode):
    """Compare outcomes, or expect the error for a changed input under checkpointing."""
    if is_checkpointed(mode, chunks):
        assert found.startswith(CHANGED_INPUT)
    else:
        verify(found, expected)
