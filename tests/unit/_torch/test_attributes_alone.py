"""Whether a tensor has its memory alone."""

import numpy as np
import torch
from torch import nn

from torchgpipe import _torch
from torchgpipe._torch import attributes
from torchgpipe._torch.attributes import is_alone


def test_memory_of_its_own():
    weight = torch.rand(3, 3, requires_grad=True)
    product = weight @ weight
    assert is_alone(product)
    assert is_alone(torch.autograd.grad(product.sum(), weight)[0])
    other = product.detach()
    assert not is_alone(other)
    del product
    assert is_alone(other)
    # Saved for backward.
    saved = (other + weight).tanh()
    assert not is_alone(saved.detach())
    assert not is_alone(torch.from_numpy(np.ones(3)))
    assert not is_alone(torch.rand(4)[:2])
    assert not is_alone(torch.rand(2, 3).t())
    module = nn.BatchNorm1d(3)
    assert not is_alone(module.running_mean.detach())
    assert not is_alone(module.weight)
    assert not is_alone(torch.eye(3).to_sparse())


def test_without_the_count(monkeypatch):
    monkeypatch.setattr(_torch, "count_uses", _torch.NAMES["count_uses"].instead, raising=False)
    attributes._uses_of_one.cache_clear()
    assert not is_alone(torch.rand(3))
    attributes._uses_of_one.cache_clear()
