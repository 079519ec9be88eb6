"""The fence: the cells that backward comes to after a cell, of those that are there."""

import torch

from torchgpipe.engine.step import Fence


def fork(fence, *cells):
    """Branch a phony off a tensor of each cell, and return the phonies by cell."""
    found = {}
    for i, j in cells:
        fence.fork(i, j, (), torch.ones(1, requires_grad=True) * 1)
        (found[i, j],) = fence._phonies[i, j]
    return found


def test_cells_before():
    fence = Fence({0: {1: range(2, 4), 3: range(4, 4)}, 1: {}})
    found = fork(fence, (0, 0), (0, 1), (1, 0), (1, 1), (0, 3))
    # The last micro-batch in the place itself, and the first one that is ahead by two or three.
    assert fence.before(2, 0) == [found[1, 0], found[0, 1]]
    assert fence.before(3, 0) == [found[1, 0], found[1, 1]]
    assert fence.before(4, 0) == [found[1, 0], found[1, 1]]
    assert fence.before(5, 0) == [found[1, 0]]
    assert fence.before(1, 1) == [found[0, 1]]
    assert fence.before(0, 0) == []


def test_a_cell_may_send_several_times():
    fence = Fence({0: {}})
    x = torch.ones(1, requires_grad=True) * 1
    for _ in range(2):
        (output,) = fence.fork(0, 0, (), x)
        assert torch.equal(output, x)
    assert len(fence.before(1, 0)) == 2
