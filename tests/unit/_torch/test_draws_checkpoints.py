"""Checkpoints of PyTorch are found on the stack, with the states that they keep."""

import torch
from torch.utils.checkpoint import checkpoint

from torchgpipe._torch import draws as checkpoints
from torchgpipe._torch.draws import find, generator_again


def test_canary():
    """Look for the new names of the local variables if this fails."""
    assert checkpoints.can_find()


def found_in(*levels):
    """Look within checkpoints, in their first runs and in backward."""
    found = []

    def compute(x, levels):
        if not levels:
            found.append(find())
            return x.sin().sin()
        preserve = levels[0]
        return checkpoint(
            compute, x, levels[1:], use_reentrant=False, preserve_rng_state=preserve
        ).sin()

    compute(torch.ones(2, requires_grad=True), levels).sum().backward()
    return found


def test_nothing_is_found_outside():
    assert found_in() == [([], None)]


def test_checkpoint():
    (first, nothing), (others, (again, run)) = found_in(True)
    assert (nothing, others) == (None, [])
    assert first[0] is again
    assert run is not None


def test_checkpoint_in_a_checkpoint():
    (first, nothing), *later = found_in(True, True)
    assert nothing is None
    assert len(first) == 2
    # The outer one runs again, and the inner one for the first time within it, then again.
    assert any(len(states) == 1 and again[0] is first[1] for states, again in later)
    assert all(again is not None for _, again in later)


def test_checkpoint_that_keeps_no_state():
    assert all(found == ([], None) for found in found_in(False))


def test_recomputations_begin_anew():
    drawn = []

    def compute(x):
        again = find()[1]
        if again is not None:
            drawn.append([torch.rand(3, generator=generator_again(*again)) for _ in range(2)])
        return x.sin().sin()

    torch.manual_seed(3)
    y = checkpoint(compute, torch.ones(2, requires_grad=True), use_reentrant=False)
    expected = [torch.rand(3), torch.rand(3)]
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert len(drawn) == 2
    for one in drawn:
        assert all(map(torch.equal, one, expected))


def test_state_to_be_kept():
    def compute(x):
        for state in find()[0]:
            checkpoints.keep(state, torch.Generator().manual_seed(7))
            # Only what was so before the first draw counts.
            checkpoints.keep(state, torch.Generator().manual_seed(8))
        drawn.append(torch.rand(3))
        return x.sin().sin()

    drawn = []
    checkpoint(compute, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert torch.equal(drawn[1], torch.rand(3, generator=torch.Generator().manual_seed(7)))
