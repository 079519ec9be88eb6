"""The phases of a run: whether it is checkpointed, or recomputes."""

import torch

from tests.support.recomputation import checkpoint
from torchgpipe import is_checkpointing, is_recomputing


def test_flags(device):
    seen = []

    def function(x):
        seen.append((is_checkpointing(), is_recomputing()))
        return x.exp()

    checkpoint(function, torch.ones(1, device=device, requires_grad=True)).backward()
    assert seen == [(True, False), (False, True)]


def test_flags_after_a_checkpoint_within(device):
    seen = []

    def function(x):
        y = checkpoint(torch.sin, x)
        seen.append((is_checkpointing(), is_recomputing()))
        return y.sin()

    checkpoint(function, torch.ones(1, device=device, requires_grad=True)).backward()
    assert seen == [(True, False), (False, True)]
    assert (is_checkpointing(), is_recomputing()) == (False, False)


def test_recomputation_of_one_within(device):
    """A first run within a recomputation is a recomputation, too."""
    seen = []

    def inner(x):
        seen.append((is_checkpointing(), is_recomputing()))
        return x * x

    x = torch.ones(1, device=device, requires_grad=True)
    checkpoint(lambda x: checkpoint(inner, x), x).backward()
    assert seen[0] == (True, False)
    assert all(recomputing for _, recomputing in seen[1:])
