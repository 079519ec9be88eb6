"""The insides of PyTorch's selective checkpoints: canaries for the attributes that are used."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchgpipe import _torch
from torchgpipe._torch.attributes import (
    judge_by,
    keeps_results,
    kept_by,
    put_into,
    results_of,
    unchanged_in,
)

SIN = torch.ops.aten.sin.default


@pytest.fixture
def modes():
    return create_selective_checkpoint_contexts([SIN])


def entries_of(mode):
    kept = kept_by(results_of(mode), SIN)
    return [x for x in kept if isinstance(x, _torch.KeptResult)]


def test_a_mode_asks_another_function(modes):
    asked = []

    def judge(policy, context, operator, *args):
        asked.append(operator)
        kept = policy(context, operator, *args) is not CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = modes
    assert keeps_results(first)
    assert not keeps_results(torch.no_grad())
    for mode in modes:
        judge_by(mode, judge)
    x = torch.rand(2)
    with first:
        x.sin()
        y = x.cos()
    assert asked == [SIN, torch.ops.aten.cos.default]
    assert not entries_of(first)
    with second:
        assert x.cos().data_ptr() == y.data_ptr()


def test_what_is_kept_can_be_another_tensor(modes):
    first, second = modes
    x = torch.rand(2)
    with first:
        y, z = x.sin(), x.exp().sin()
    one, other = entries_of(first)
    assert torch.equal(unchanged_in(one), y)
    other.val.add_(1)
    assert unchanged_in(other) is None
    put_into(one, new := z + 2, new._version)
    assert unchanged_in(one) is new
    with second:
        assert x.sin() is new
        with pytest.raises(RuntimeError, match="has been mutated"):
            x.exp().sin()
