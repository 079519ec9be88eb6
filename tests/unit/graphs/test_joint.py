"""Joint graphs know the roles of their nodes."""

import torch
from torch import nn

from tests.support.graphs import traced


def test_roles():
    found = traced(nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True))
    joint = found.joint
    roles = [len(joint.state), len(joint.inputs), len(joint.more), len(joint.tangents)]
    assert roles == [2, 1, 0, 1]
    assert len(joint.outputs) == len(joint.input_grads) == 1
    assert len(joint.weight_grads) == 2
    assert set(joint.forward) | joint.backward == set(joint.calls)
    assert not set(joint.forward) & joint.backward


def test_replace_reaches_the_roles():
    joint = traced(nn.Tanh(), torch.rand(2, requires_grad=True)).joint
    (old,) = joint.outputs
    new = joint.inputs[0]
    joint.replace(old, new)
    assert joint.outputs == [new]


def test_the_same_without_data():
    found = traced(nn.Linear(3, 3), torch.rand(2, 3, requires_grad=True))
    batch, more = found.joint.like(found.batch, ())
    (x,) = batch
    assert x.shape == (2, 3)
    assert x.requires_grad
    assert type(x) is not torch.Tensor
    assert not more
