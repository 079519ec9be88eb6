"""Changes between forward and backward: the forward counts, or the change is an error."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import note_of, plain, wrap
from tests.support.recomputation import CHECKPOINTED, M, numbered
from torchgpipe import GPipe, MappedGPipe, ScheduledLoss


def layers():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.4), nn.Linear(4, 2))
    )


@pytest.mark.parametrize("training", [True, False])
def test_switched_between_forward_and_backward(mode, training, device):
    """The gradients are those of the mode of the forward, and the modes stay switched."""
    model = wrap(layers(), device, mode, balance=[2, 1]).train(training)
    reference = copy.deepcopy(model)
    x = torch.randn(6, 3, device=device)
    torch.manual_seed(1)
    reference(x).square().sum().backward()
    torch.manual_seed(1)
    loss = model(x).square().sum()
    model.train(not training)
    loss.backward()
    assert {module.training for module in model.modules()} == {not training}
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(reference.buffers(), model.buffers()):
        assert torch.equal(a, b)


def test_a_layer_switched_alone(mode, device):
    """Scripts that freeze norms switch them alone, after ``model.train()``."""
    model = wrap(layers(), device, mode, balance=[2, 1])
    model[1].eval()
    reference = copy.deepcopy(model.module)
    reference[2][0].p = model[2][0].p = 0.0
    x = torch.randn(6, 3, device=device)
    plain(reference, x, M).square().sum().backward()
    loss = model(x).square().sum()
    model.train()
    loss.backward()
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def hook_removed(layer, loss):
    handle = layer.register_forward_hook(lambda layer, args, y: y * 1.5)
    output = loss()
    handle.remove()
    return output


def hook_added(layer, loss):
    output = loss()
    layer.register_forward_pre_hook(lambda layer, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda layer, args, kwargs, y: y * 1.5, with_kwargs=True)
    return output


def frozen(layer, loss):
    output = loss()
    layer.requires_grad_(False)
    return output


def unfrozen(layer, loss):
    layer.requires_grad_(False)
    output = loss()
    layer.requires_grad_(True)
    return output


@pytest.mark.parametrize("change", [hook_removed, hook_added, frozen, unfrozen])
def test_changed_between_forward_and_backward(change, mode):
    """The graph of the forward counts, and the change stays."""
    reference = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh())
    model = wrap(copy.deepcopy(reference), mode=mode, balance=[1, 3])
    x = torch.randn(6, 2)
    found = []
    for layers, run in ((reference, lambda x: plain(reference, x, M)), (model, model)):
        change(layers[2], lambda run=run: run(x).square().sum()).backward()
        layer = layers[2]
        hooks = [len(layer._forward_hooks), len(layer._forward_hooks_with_kwargs)]
        found.append([*hooks, len(layer._forward_pre_hooks), layer.weight.requires_grad])
    assert found[0] == found[1]
    for a, b in zip(reference.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_parameter_changed_in_place_is_an_error(mode, device):
    """PyTorch raises an error without checkpointing; with checkpointing, torchgpipe does."""
    model = wrap(layers(), device, mode, balance=[2, 1])
    loss = model(torch.rand(6, 3, device=device)).sum()
    with torch.no_grad():
        model[1].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace|layer: Batch.*weight") as caught:
        loss.backward()
    if mode == "always":
        assert note_of(caught.value) == f"raised in partition 0, micro-batch {M - 1}"
    assert all(p.grad is None for p in [*model.partitions[0].parameters()])


@pytest.mark.parametrize("mode", CHECKPOINTED)
def test_values_put_elsewhere_between_forward_and_backward(mode):
    """Values put elsewhere change a tensor in place, though no version counter counts that."""
    model = wrap([nn.Linear(2, 2), nn.Tanh()], mode=mode, balance=[2])
    loss = model(numbered()).sum()
    model[0].weight.data = model[0].weight.data * 2
    with pytest.raises(RuntimeError, match="parameters must not be changed"):
        loss.backward()


class Shifted(nn.Module):
    """Add a buffer, which autograd saves for nobody."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(2))

    def forward(self, x):
        return (x + self.shift).exp()


def change_in_place(buffer):
    buffer.add_(1)


def change_memory(buffer):
    buffer.data = buffer + 1


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("change", [change_in_place, change_memory])
def test_buffer_changed_between_forward_and_backward(mode, change, large, monkeypatch):
    """The gradient is that of the forward; the change of a large one is an error."""
    if large:
        monkeypatch.setattr("torchgpipe.recompute.buffers.SMALL", 0)
    model = wrap([Shifted(), nn.Linear(2, 2)], mode=mode, balance=[2])
    # The first step learns that the layer does not change it.
    model(numbered()).sum().backward()
    expected = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    loss = model(numbered()).sum()
    change(model[0].shift)
    if large and mode in CHECKPOINTED:
        with pytest.raises(
            RuntimeError, match="a large buffer must not be(?s:.*)Shifted, buffer: shift"
        ):
            loss.backward()
        return
    loss.backward()
    assert all(map(torch.equal, expected, [x.grad for x in model.parameters()]))
    assert torch.equal(model[0].shift, torch.ones(2))


class Amax(torch.autograd.Function):
    """Note the largest gradient, as layers in 8 bits do for the scales of the next step."""

    @staticmethod
    def forward(ctx, x, amax):
        ctx.amax = amax
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.amax.copy_(grad.abs().max())
        return 2 * grad, None


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("amax", torch.ones(()))

    def forward(self, x):
        return (Amax.apply(x, self.amax) - self.amax).exp()


def test_buffer_that_backward_writes(mode):
    model = wrap([Noting(), nn.Linear(2, 2)], mode=mode, balance=[2])
    reference = copy.deepcopy(model.module)
    for _ in range(3):
        x = numbered().detach()
        reference(x).sum().backward()
        model(x).sum().backward()
        for a, b in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(a.grad, b.grad)
        model[0].amax.copy_(reference[0].amax)


#: The ways in which a layer may change a parameter, but for those that nobody counts.
IN_FORWARD = {
    "in place": lambda layer, x: layer.scale.copy_(x),
    "in place twice": lambda layer, x: layer.scale.mul_(0.8).add_(0.1),
    "new memory": lambda layer, x: setattr(layer.scale, "data", x),
    "another dtype": lambda layer, x: setattr(layer.scale, "data", x.double()),
    "another": lambda layer, x: setattr(layer, "scale", nn.Parameter(x, layer.scale.requires_grad)),
}


class Changing(nn.Module):
    """A layer that changes a parameter in its forward."""

    def __init__(self, how, trains=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2), requires_grad=trains)
        self.how = IN_FORWARD[how]

    def forward(self, x):
        with torch.no_grad():
            self.how(self, x.detach().abs().mean(0) + 1)
        return (x / self.scale.clone()).tanh().to(x.dtype)


@pytest.mark.parametrize("wrapper", ["GPipe", "MappedGPipe", "1f1b"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("how", IN_FORWARD)
@pytest.mark.parametrize("mode", CHECKPOINTED)
def test_a_layer_that_changes_a_parameter_in_its_forward(mode, how, trains, wrapper):
    layers = nn.Sequential(nn.Linear(2, 2), Changing(how, trains), nn.Linear(2, 2))
    if wrapper == "MappedGPipe":
        places = {str(k): "cpu" for k in range(3)}
        model = MappedGPipe(layers, places, chunks=4, checkpoint=mode)
    else:
        model = GPipe(layers, [2, 1], devices=["cpu"] * 2, chunks=4, checkpoint=mode)
    if wrapper == "1f1b":
        model = ScheduledLoss(model, lambda y: y.square().mean(), "1f1b")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Changing, parameter: scale"):
            model(torch.rand(8, 2)).square().mean().backward()


def test_weights_that_stay_as_they_are(mode):
    """An embedding whose norm is limited changes its weight, and changes it no more after that."""
    layers = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Tanh(), nn.Linear(4, 4))
    reference = copy.deepcopy(layers)
    model = wrap(layers, mode=mode, balance=[3])
    for _ in range(2):
        for owner in (reference, model):
            owner(torch.arange(6)).square().sum().backward()
        for a, b in zip(reference.parameters(), model.parameters()):
            torch.testing.assert_close(a.grad, b.grad)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_memory_of_a_buffer_replaced_between(mode):
    """A recomputation has the buffer of the first run, in the first step and in later ones."""
    model = GPipe(nn.Sequential(Scale(), nn.Tanh()), [2], devices=["cpu"], chunks=2)
    model.checkpoint = mode
    for _ in range(3):
        x = torch.full((4, 1), 0.3, requires_grad=True)
        output = model(x)
        model[0].scale.data = torch.tensor(5.0)
        output.sum().backward()
        # Without checkpointing, autograd holds the buffer itself, and so finds its new memory.
        kept = x.grad[: 2 if mode == "except_last" else 4]
        torch.testing.assert_close(kept, 2 * (1 - torch.full_like(kept, 0.6).tanh() ** 2))
        model[0].scale.data = torch.tensor(2.0)


@pytest.mark.parametrize("mode", ["always", "except_last"])
def test_memory_of_a_buffer_replaced_where_nothing_is_computed_again(mode):
    """Such a cell holds the buffer as the forward found it."""
    model = GPipe(nn.Sequential(Scale()), [1], devices=["cpu"], chunks=2, checkpoint=mode)
    for _ in range(3):
        x = torch.ones(2, 1, requires_grad=True)
        output = model(x)
        model[0].scale.data = torch.tensor(5.0)
        output.sum().backward()
        assert x.grad[0].item() == 2
        model[0].scale.data = torch.tensor(2.0)
