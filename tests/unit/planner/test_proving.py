"""Replicas that are trained together have the choice of the first process."""

import pytest
import torch

from torchgpipe.planner.proving import agreed


@pytest.fixture
def process(monkeypatch):
    """Be one of two processes, whose first one has sent something; return what this one sends."""
    sent = []

    def be(rank, first=None):
        def broadcast(found):
            sent.extend(found)
            found[:] = found if rank == 0 else first

        group = torch.distributed
        monkeypatch.setattr(group, "is_available", lambda: True)
        monkeypatch.setattr(group, "is_initialized", lambda: True, raising=False)
        monkeypatch.setattr(group, "get_world_size", lambda: 2, raising=False)
        monkeypatch.setattr(group, "get_rank", lambda: rank, raising=False)
        monkeypatch.setattr(group, "broadcast_object_list", broadcast, raising=False)
        return sent

    return be


def test_alone():
    assert agreed(lambda: 3) == 3


def test_first(process):
    sent = process(0)
    assert agreed(lambda: 3) == 3
    assert sent == [3, None]


def test_other(process):
    process(1, [3, None])
    assert agreed(lambda: 1 / 0) == 3


def test_an_error_is_one_of_all(process):
    sent = process(0)
    with pytest.raises(ZeroDivisionError):
        agreed(lambda: 1 / 0)
    process(1, sent[:])
    with pytest.raises(ZeroDivisionError):
        agreed(lambda: 3)
