"""The insides of PyTorch's selective checkpoints: canaries for the attributes that are used."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchgpipe._torch.attributes import judge_by, keeps_results

SIN = torch.ops.aten.sin.default


@pytest.fixture
def modes():
    return create_selective_checkpoint_contexts([SIN])


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
        z = x.sin()
        y = x.cos()
    assert asked == [SIN, torch.ops.aten.cos.default]
    with second:
        assert x.cos().data_ptr() == y.data_ptr()
        assert x.sin().data_ptr() != z.data_ptr()
