"""Arguments of a pipeline over processes that are wrong: the rule, the value, the remedy."""

import re
from math import nan

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from torchgpipe.distributed import Pipe

#: By argument: values that are wrong in every process.
WRONG = {
    "module": (None, nn.Linear(1, 1), nn.Sequential),
    "balance": (None, 3, "x", [], [nan], [1]),
    "loss": ("x", 3),
    "schedule": (None, 3, "x", [], lambda workers, chunks: None),
    "chunks": (None, "x", 0, -1, nan, 1.5),
    "checkpoint": (None, 3, "x", ["never"]),
    "deferred_batch_norm": ("x", None),
    "outputs": ("x", None),
    "group": ("x", 3, [0, 1]),
    "replicas": ("x", 3),
    "device": ("x", 3, -1, 10**30, nan, []),
}


def layers():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def made(own, **options):
    arguments = {"module": layers(), "balance": [1, 1], "loss": F.mse_loss, "group": own}
    return Pipe(**arguments | options)


def wrong(group):
    """Check each value of each argument."""
    calls = [
        (f"{name}={value!r}", lambda name=name, value=value: made(group, **{name: value}))
        for name, values in WRONG.items()
        for value in values
    ]
    pipe = made(group)
    for numbers in (("x",), (nan,), (-1.0,), (1.0, 0), (1.0, "x"), (1.0, nan), (None,)):
        calls.append((f"clip{numbers}", lambda numbers=numbers: pipe.clip_grad_norm_(*numbers)))
    for name, call in calls:
        with pytest.raises((TypeError, ValueError)) as found:
            call()
        assert re.search(r".+\(.*: ?.*\).*; .+", str(found.value), re.DOTALL), name
        assert type(found.value) in (TypeError, ValueError)
    # Nobody waits for anybody afterwards.
    assert pipe.step(*torch.rand(2, 4, 6)).dim() == 0


def test_wrong_values(processes):
    processes.run(wrong, 2)


def outside(group):
    """Check a group that this process is no member of."""
    ranks = [0, 1]
    pair = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        made(pair)
        return
    with pytest.raises(ValueError, match=r"in each process of its group.*no member: \d\); call"):
        made(pair)
    with pytest.raises(ValueError, match="in no other"):
        Pipe(layers(), [1, 1], group=pair)


def test_group_of_others(processes):
    processes.run(outside, 4)
