"""Skips go straight from device to device; devices in between see no copy and no byte."""

from collections import Counter

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import observe

WIDTH, ROWS = 4, 2

#: Bytes of a micro-batch, and how many times as many a skip has.
VALUE, WIDER = ROWS * WIDTH * 4, 7

#: From which partition to which one the skips of a model lead.
LAYOUTS = {
    "none": [],
    "adjacent": [(1, 2)],
    "long": [(0, 3)],
    "nested": [(0, 3), (1, 2)],
    "several from one": [(0, 1), (0, 2), (0, 3)],
    "several to one": [(0, 3), (1, 3), (2, 3)],
    "crossed": [(0, 2), (1, 3)],
}


def layer(j, skips):
    """A partition that stashes the skips that begin there and pops those that end."""
    stashed = [f"{a}-{b}" for a, b in skips if a == j]
    popped = [f"{a}-{b}" for a, b in skips if b == j]

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            x = x * self.weight
            for name in popped:
                skip = yield pop(name)
                x = x + skip[:, :WIDTH]
            for name in stashed:
                yield stash(name, x.repeat(1, WIDER))
            return x.tanh()

    return skippable(stash=stashed, pop=popped)(Layer)() if skips else nn.Tanh()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_copied_between_devices(devices, name, mode, requires_grad):
    n, m, skips = 4, 5, LAYOUTS[name]
    model = wrap([layer(j, skips) for j in range(n)], devices[:n], mode, m)
    x = torch.rand(ROWS * m, WIDTH, device=devices[0], requires_grad=requires_grad)
    with observe(jitter=0) as seen:
        output = model(x)
        if output.requires_grad:
            output.sum().backward()
    assert_no_races(seen)

    copies, volume = Counter(), Counter()
    both_ways = output.requires_grad
    for a, b, size in [(j, j + 1, VALUE) for j in range(n - 1)] + [
        (a, b, WIDER * VALUE) for a, b in skips
    ]:
        for link in [(a, b), (b, a)][: 1 + both_ways]:
            copies[link] += m
            volume[link] += m * size
    found = {
        link: transfers
        for link, transfers in seen.transfers.items()
        if "cpu" not in link and link[0] != link[1]
    }
    assert {link: transfers.count for link, transfers in found.items()} == copies
    assert {link: transfers.bytes for link, transfers in found.items()} == volume


@pytest.mark.parametrize("mode", MODES)
def test_gradients_leave_in_the_order_in_which_they_are_needed(devices, mode):
    """Gradients of skips leave before the value's; else they would arrive in any order."""
    n, m, skips = 4, 5, LAYOUTS["several to one"]
    model = wrap([layer(j, skips) for j in range(n)], devices[:n], mode, m)
    with observe(jitter=0, bandwidth={(3, j): 1e3 for j in range(3)}) as seen:
        model(torch.rand(ROWS * m, WIDTH, device=devices[0])).sum().backward()
    targets = [int(span.name[-1]) for span in seen.spans]
    assert targets == [2, 1, 0, 2] * m
