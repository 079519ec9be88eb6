"""The search for maps that fit takes the fastest of them, or else the nearest map."""

import itertools
import random
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

from tests.support.size import some
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import Footprint


def every_cut(n, count):
    for cuts in itertools.combinations(range(1, n), count - 1):
        yield [b - a for a, b in pairwise((0, *cuts, n))]


def fitted(costs, limits, peak):
    blocks = {str(k): nn.Linear(1, 1) for k in range(len(costs))}

    def need(names):
        numbers = [int(x) for x in names if x is not None]
        return peak(min(numbers), max(numbers) + 1)

    return maps.Units(blocks, dict(zip(blocks, costs))).cut(limits, need)[0]


@pytest.mark.parametrize("seed", range(some(20, 8)))
def test_no_other_cut_is_better(seed):
    draw = random.Random(seed)
    n, count = draw.choice([5, 6, 7]), draw.choice([2, 3])
    costs = [draw.uniform(1, 3) for _ in range(n)]
    sizes = [draw.uniform(1, 3) for _ in range(n)]
    limits = [draw.uniform(0.7, 1.5) * sum(sizes) / count for _ in range(count)]

    def peak(a, b):
        return sum(sizes[a:b])

    def slowest(cut):
        return max(sum(costs[a:b]) for a, b in pairwise(accumulate(cut, initial=0)))

    def lack(cut):
        ends = pairwise(accumulate(cut, initial=0))
        return max([0.0, *[peak(*x) - limit for x, limit in zip(ends, limits)]])

    found = fitted(costs, limits, peak)
    fits = [cut for cut in every_cut(n, count) if not lack(cut)]
    if fits:
        assert lack(found) == 0
        assert slowest(found) == pytest.approx(min(map(slowest, fits)))
    else:
        assert lack(found) == pytest.approx(min(map(lack, every_cut(n, count))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def test_weights():
    model = Model()
    model.blocks[1].requires_grad_(False)
    model.blocks[3].weight = model.blocks[0].weight
    blocks, state = Wholes.of(model).blocks(), 2.0
    footprint = Footprint(model, blocks, [], 4, 0, state)
    weight, bias = 4 * 8 * 8, 4 * 8
    # A buffer of two numbers, and a parameter of one, which are in no block.
    assert footprint.need({None}) == 8 + 4 * (2 + state)
    assert footprint.need({"blocks.1"}) == weight + bias
    assert footprint.need({"blocks.2"}) == (weight + bias) * (2 + state)
    assert footprint.need({"blocks.0"}) == (weight + bias) * (2 + state)
    # A copy of a weight whose home is another block, and its gradient.
    assert footprint.need({"blocks.3"}) == 2 * weight + bias * (2 + state)
    assert footprint.need({"blocks.0", "blocks.3"}) == (weight + 2 * bias) * (2 + state)


def test_message():
    places = [torch.device("cpu"), torch.device("meta")]
    text = str(maps._too_large(places, [1e3, 98.0], [0.0, 12.4], 8, "never"))
    assert "checkpoint: never, the nearest map: meta lacks 12 bytes, and may fill 98)" in text
    assert "use more devices, checkpoint='always', a larger limit as memory, or smaller" in text
    assert "'always'," not in str(maps._too_large(places, [1.0] * 2, [0.0, 1.0], 8, "always"))
