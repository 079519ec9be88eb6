"""The insides of PyTorch's selective checkpoints: canaries for the attributes that are used."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchgpipe._torch.attributes import bypass_hooks, judge_by, keeps_results

SIN = torch.ops.aten.sin.default


@pytest.fixture
def modes():
    return create_selective_checkpoint_contexts([SIN])


@pytest.mark.filterwarnings("error")
def test_a_mode_does_not_ask_the_hooks_of_a_checkpoint(modes):
    """PyTorch warns from 2.14 on, unless the mode has been told."""
    first, _ = modes
    bypass_hooks(first)
    assert first.respect_saved_tensors_hooks is False
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with hooks, first:
        torch.rand(2, requires_grad=True).sin()


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
