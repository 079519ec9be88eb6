"""Phonies."""

import torch

from torchgpipe.autograd.fork_join import get_phony


def test_takes_no_memory(device):
    phony = get_phony(device, requires_grad=False)
    assert phony.shape == (0,)
    assert phony.device == device
    assert phony.untyped_storage().nbytes() == 0


def test_is_made_once(device):
    assert get_phony(device, requires_grad=False) is get_phony(device, requires_grad=False)
    assert get_phony(device, requires_grad=True) is get_phony(device, requires_grad=True)


def test_requires_grad(device):
    assert get_phony(device, requires_grad=True).requires_grad
    assert not get_phony(device, requires_grad=False).requires_grad


def test_outlives_inference_mode(monkeypatch):
    monkeypatch.setattr("torchgpipe.autograd.fork_join._phonies", {})
    with torch.inference_mode():
        get_phony(torch.device("cpu"), requires_grad=False)
    assert not get_phony(torch.device("cpu"), requires_grad=False).is_inference()
