"""Places know where modules have their tensors, and when something about the modules changes."""

import pytest
import torch
from torch import nn

from torchgpipe.graphs.places import Places, UntraceableError, has_hooks, verify_plain


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.constant = torch.ones(2)
        self.list, self.found = [self.layer.weight, 3], []
        self.rate = 0.5


def test_tensors():
    layer = Layer()
    found = Places([layer]).read()
    expected = [*layer.parameters(), *layer.buffers(), layer.constant]
    assert {id(x) for x in found} == {id(x) for x in expected}
    assert len(found) == len(expected)


def test_other_tensors_for_a_time():
    layer = Layer()
    places = Places([layer])
    weight, constant, mean = layer.layer.weight, layer.constant, layer.norm.running_mean
    others = [x.detach() + 1 for x in places.read()]
    with places.put(others) as replaced:
        assert layer.list[0] is layer.layer.weight is not weight
        assert torch.equal(layer.constant, torch.full((2,), 2.0))
    assert layer.layer.weight is layer.list[0] is weight
    assert layer.constant is constant
    assert not replaced.moved
    with places.put(others) as replaced:
        layer.norm.running_mean = torch.zeros(2)
    assert replaced.moved
    assert layer.norm.running_mean is mean


def replace_weight(layer):
    layer.layer.weight = nn.Parameter(torch.rand(2, 2))


CHANGES = {
    "mode": lambda x: x.eval(),
    "number": lambda x: setattr(x, "rate", 0.1),
    "module": lambda x: setattr(x, "layer", nn.Linear(2, 2)),
    "frozen": lambda x: x.layer.weight.requires_grad_(False),
    "dtype": lambda x: x.double(),
    "constant": lambda x: setattr(x, "constant", torch.ones(3)),
    "module gone": lambda x: delattr(x, "norm"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change):
    layer = Layer()
    places = Places([layer])
    assert places.are_current()
    CHANGES[change](layer)
    assert not places.are_current()


def test_other_values_are_no_change():
    layer = Layer()
    del layer.list
    places = Places([layer])
    replace_weight(layer)
    with torch.no_grad():
        layer.norm.running_mean.add_(1)
    assert places.are_current()
    assert any(x is layer.layer.weight for x in places.read())


def append(x):
    x.found.append(1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (append, "Layer.found"),
        (lambda x: setattr(x, "rate", 2), "Layer.rate"),
        (lambda x: setattr(x, "new", 2), "Layer.new"),
        (lambda x: x.norm.__dict__.update(eps=1), "BatchNorm1d.eps"),
    ],
)
def test_attributes_are_restored(change, name):
    layer = Layer()
    before = {**layer.__dict__}
    with Places([layer]).restored() as restored:
        change(layer)
    assert restored.changed.strip() == name
    assert layer.__dict__ == before
    assert layer.found == []
    assert layer.norm.eps == 1e-5
    with Places([layer]).restored() as restored:
        pass
    assert restored.changed is None


def test_hooks():
    layer = Layer()
    assert not has_hooks([layer])
    handle = layer.layer.register_forward_hook(lambda *_: None)
    assert has_hooks([layer])
    handle.remove()
    assert not has_hooks([layer])


def test_tensors_of_other_classes():
    verify_plain([torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))])
    with pytest.raises(UntraceableError, match="Sub"):
        verify_plain([torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {}))])
    with pytest.raises(UntraceableError, match="sparse"):
        verify_plain([torch.ones(2).to_sparse()])
