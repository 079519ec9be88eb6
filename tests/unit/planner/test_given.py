"""Arguments of a plan, and what is wrong with some."""

from functools import partial
from math import inf

import pytest
import torch

from torchgpipe.planner.given import Loss, chunks_of, limits_of, looks_of, places_of, state_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.SGD, 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (1.5, 1.5),
    ],
)
def test_state_of_an_optimizer(optimizer, expected):
    assert state_of(optimizer) == expected


@pytest.mark.parametrize(
    ("function", "args", "kind", "words"),
    [
        (state_of, ("adam",), TypeError, "such as torch.optim.AdamW"),
        (state_of, (-1,), ValueError, "optimizer: -1"),
        (chunks_of, ([0], 8), ValueError, "from 1 to the rows"),
        (chunks_of, ([16], 8), ValueError, r"chunks: \[16\], rows: 8"),
        (limits_of, ([1.0], [CPU, CPU]), ValueError, "devices: 2"),
        (limits_of, (0, [CPU]), ValueError, "memory"),
        (limits_of, ("10 gigs", [CPU]), ValueError, "such as '10GiB'.*memory: '10 gigs'"),
        (limits_of, ({"cpu": "10Gb"}, [CPU]), ValueError, "such as '10GiB'"),
        (limits_of, ({"cpu": True}, [CPU]), ValueError, "memory: {'cpu': True}"),
        (limits_of, ({}, [CPU]), ValueError, "memory: {}, missing: cpu.; add them"),
        (limits_of, ({"disk": 1}, [CPU]), ValueError, "accelerators of this machine.*disk"),
        (places_of, ([],), ValueError, "one or more accelerators"),
    ],
)
def test_errors(function, args, kind, words):
    with pytest.raises(kind, match=words):
        function(*args)


def test_defaults():
    assert chunks_of(None, 20) == [1, 2, 4, 8, 16]
    assert chunks_of(8, 20) == chunks_of([8], 20) == [8]
    assert chunks_of(None, 1000)[-1] == 64
    assert limits_of(None, [CPU]) == [inf]
    assert limits_of(100, [CPU, CPU]) == [100, 100]
    assert limits_of({"cpu": 100}, [CPU, CPU]) == [100, 100]
    texts = ["1KB", "1 KiB", "1.5MB", "10GiB", "1TiB"]
    assert limits_of(texts, [CPU] * 5) == [1000, 1024, 1.5e6, 10 * 2**30, 2**40]


@pytest.mark.parametrize(
    ("have", "rows", "expected"),
    [
        (64, 64, [16, 8]),
        (16, 64, [16, 8]),
        (8, 8, [4, 2]),
        (9, 9, [5, 3]),
        (3, 3, [3]),
        (1, 64, [1]),
    ],
)
def test_micro_batches_to_look_at(have, rows, expected):
    found = looks_of(torch.zeros(have, 2), have, rows)
    assert [*found] == expected
    assert [len(next(iter(x))) for x in found.values()] == expected


def test_loss_takes_the_rows_that_come():
    loss = Loss(lambda y, t, scale: (y - t).sum() * scale, (torch.ones(8, 2), 3))
    assert loss(torch.zeros(4, 2)) == -24
