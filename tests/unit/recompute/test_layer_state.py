"""State of layers: a recomputation finds it as the forward did, and leaves it alone."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.support.recomputation import checkpoint
from torchgpipe.recompute.layer_state import LayersState

NORMS = {
    "BatchNorm1d": lambda **kw: nn.BatchNorm1d(3, **kw),
    "BatchNorm2d": lambda **kw: nn.BatchNorm2d(3, **kw),
    "InstanceNorm1d": lambda **kw: nn.InstanceNorm1d(3, track_running_stats=True, **kw),
}


def input(norm, device):
    return torch.rand(4, 3, *[5] * {"1": 1, "2": 2}[type(norm).__name__[-2]], device=device)


def saved(function):
    """The output of a function, and the shapes that autograd saves."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x.shape), lambda x: x):
        output = function()
    return output, found


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_left_alone(name, affine, momentum, device):
    norm = NORMS[name](affine=affine, momentum=momentum).to(device)
    x = input(norm, device).requires_grad_()
    state, copies = LayersState(nn.Sequential(norm), {}), []
    with state.buffers.first_run(copies):
        first, saved_first = saved(lambda: norm(x))
    buffers = dict(norm.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    with state.restored(copies):
        second, saved_second = saved(lambda: norm(x))
    assert torch.equal(first, second)
    assert saved_first == saved_second
    for name, buffer in norm.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, values[name]), name


def test_all_is_as_before_after_an_exception():
    norm = nn.BatchNorm1d(3)
    state = LayersState(norm, {})
    state.end_forward()
    norm.eval()
    norm._parameters["weight"] = replaced = nn.Parameter(torch.ones(3))
    buffers = dict(norm._buffers)
    with pytest.raises(KeyError), state.restored():
        norm(torch.rand(2, 3))
        raise KeyError
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())
    assert norm.weight is replaced
    assert not norm.training


def test_all_is_as_before_where_it_cannot_be_restored(monkeypatch):
    norm = nn.BatchNorm1d(3)
    state = LayersState(norm, {})
    copies = [state.buffers.copied()]
    norm.eval()
    buffers = dict(norm._buffers)

    def fail(buffer):
        raise MemoryError

    monkeypatch.setattr("torchgpipe.recompute.buffers._copied", fail)
    with pytest.raises(MemoryError), state.restored(copies):
        pass
    assert not norm.training
    assert all(norm._buffers[name] is buffer for name, buffer in buffers.items())


def test_norms_without_statistics_to_update_are_left_as_they_are():
    norms = nn.Sequential(
        nn.BatchNorm1d(3).eval(), nn.BatchNorm1d(3, track_running_stats=False), nn.LayerNorm(3)
    )
    buffers = [dict(norm._buffers) for norm in norms]
    with LayersState(norms, {}).restored():
        assert [dict(norm._buffers) for norm in norms] == buffers
        norms(torch.rand(2, 3))


def test_parameters_that_the_layers_change_themselves():
    norm = nn.Embedding(3, 2, max_norm=0.1)
    state = LayersState(norm, {})
    norm(torch.tensor([0, 1]))
    state.end_forward()
    for _ in range(2):
        with state.restored():
            norm(torch.tensor([1, 2]))


def test_flags_of_the_forward_are_restored():
    """Each flag is restored by itself: a frozen layer within stays in eval mode."""
    layers = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout().eval()))
    state = LayersState(layers, {})

    def flags():
        return [module.training for module in layers.modules()]

    before = flags()
    layers.eval()
    with state.restored():
        assert flags() == before == [True, True, True, False]
    assert flags() == [False] * 4


def test_replaced_tensors_of_the_forward_are_restored():
    norm = nn.BatchNorm1d(2).eval()
    weight, mean = norm.weight, norm.running_mean
    replaced = {"weight": torch.rand(2), "running_mean": torch.rand(2)}
    states = []
    norm.register_forward_hook(lambda *args: states.append(LayersState(norm, {})))
    expected = functional_call(norm, replaced, x := torch.rand(3, 2))
    with states[0].restored():
        assert norm.weight is replaced["weight"]
        assert torch.equal(norm(x), expected)
    assert norm.weight is weight
    assert norm.running_mean is mean


def test_buffer_that_is_replaced_by_the_layer_is_left_as_found():
    class Count(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x

    layer = Count()
    state = LayersState(layer, {})
    layer(None)
    with state.restored():
        layer(None)
    assert layer.count.item() == 1


def test_tensor_that_was_deleted_stays_deleted():
    layer = nn.Linear(1, 1)
    state = LayersState(layer, {})
    state.end_forward()
    del layer.bias
    with state.restored():
        layer(torch.rand(1))
    assert not hasattr(layer, "bias")


def test_parameter_changed_in_place_is_an_error():
    layer = nn.Linear(2, 3)
    state = LayersState(layer, {})
    state.end_forward()
    with state.restored():
        pass
    with torch.no_grad():
        layer.bias.add_(1)
    expected = r"Linear, parameter: bias, shape: \(3,\), version: 2, expected version: 1.*step"
    with pytest.raises(RuntimeError, match=expected), state.restored():
        pytest.fail("not reached")


def test_checkpoint_of_a_function_has_no_layers():
    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, x).backward()
    assert torch.equal(x.grad, x.cos())
