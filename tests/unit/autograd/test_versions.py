"""Version counters: changes in place are counted, and counters hold no memory."""

import weakref

import pytest
import torch
from torch import nn

from torchgpipe.autograd.versions import counter_of, unchanged, version_of
from torchgpipe.recompute.layer_state import LayersState


def test_version_of_what_has_none():
    with torch.inference_mode():
        x = torch.ones(1)
        x.add_(1)
    assert version_of(x) == -1
    LayersState(nn.ParameterList([nn.Parameter(x, requires_grad=False)]), {})
    assert version_of(counter_of(x)) == -1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_counter_of_changes_holds_no_memory(requires_grad, device):
    x = torch.ones(2, 3, requires_grad=requires_grad, device=device) * 2
    counter = counter_of(x[:, :1])
    assert version_of(counter) == version_of(x)
    x.view(-1).mul_(2)
    assert version_of(counter) == version_of(x) == 1
    alive = weakref.ref(x.untyped_storage())
    del x
    assert alive() is None
    assert version_of(counter) == 1


def test_counter_of_what_has_no_memory_of_one_piece():
    x = torch.eye(2).to_sparse()
    counter = counter_of(x)
    x.mul_(2)
    assert version_of(counter) == version_of(x) == 1


def test_change_of_what_goes_whole_is_an_error():
    x = torch.ones(2, 3)
    with unchanged([x]):
        x.add(1)
    message = r"gets whole must not .*shapes: \[\(2, 3\)\]\); clone"
    with pytest.raises(RuntimeError, match=message), unchanged([x]):
        x.add_(1)


def test_error_of_a_layer_passes_a_change():
    x = torch.ones(1)
    with pytest.raises(KeyError), unchanged([x]):
        x.add_(1)
        raise KeyError
