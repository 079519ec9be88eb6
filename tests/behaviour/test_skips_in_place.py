"""Skips and changes in place: the values of the plain module, or an error."""

import pytest
import torch
from torch import nn

from tests.support.helpers import CPUS, plain, run_pipeline
from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash

WIDTH = 3


@skippable(stash=["x"])
class Own(nn.Module):
    """A layer that stashes its output, or a view of its output."""

    def __init__(self, view):
        super().__init__()
        self.linear, self.view = nn.Linear(WIDTH, WIDTH), view

    def forward(self, input):
        y = self.linear(input)
        yield stash("x", y[:, :2] if self.view else y)
        return y


@skippable(pop=["x"])
class Sum(nn.Module):
    def forward(self, input):
        x = yield pop("x")
        return input.square() + x.sin().sum(1, keepdim=True)


class InPlace(nn.Module):
    """A layer that changes its input in place, and has no flag for it."""

    def forward(self, x):
        return x.relu_()


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), InPlace()], ids=["told", "found out"])
@pytest.mark.parametrize("between", [[], [nn.Identity()]], ids=["next", "later"])
@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 1, 1, 0]])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_output_that_is_stashed_and_changed_in_place_later(view, layer, between, places, mode):
    """The skip would have to change, too, wherever it is by then; so the change is an error."""
    layers = [Own(view), *between, layer, nn.Tanh(), Sum()]
    partitions = [nn.Sequential(part) for part in layers]
    devices = [CPUS[k] for k in [*places, 0][: len(partitions)]]
    with pytest.raises(
        RuntimeError, match="must not be views of one tensor|must not change its input"
    ):
        run_pipeline(partitions, devices, torch.rand(4, WIDTH), chunks=2, mode=mode)
    # Within one partition, layers change the skip as in the plain module.
    x = torch.rand(4, WIDTH)
    module = nn.Sequential(*layers)
    output = run_pipeline([module], CPUS[:1], x, chunks=2, mode=mode)
    expected = plain(module, x, 2)
    assert torch.equal(output, expected)
    parameters = list(module.parameters())
    for a, b in zip(
        torch.autograd.grad(output.sum(), parameters),
        torch.autograd.grad(expected.sum(), parameters),
    ):
        assert torch.allclose(a, b)


@skippable(stash=["x", "y"])
class Both(nn.Module):
    """A layer that stashes one tensor under two names."""

    def forward(self, input):
        x = input.sin()
        yield stash("x", x)
        yield stash("y", x)
        return x.tanh() * 1


def in_place(name):
    @skippable(pop=[name])
    class Pop(nn.Module):
        def forward(self, input):
            tensor = yield pop(name)
            return input + tensor.mul_(2)

    return Pop()


@pytest.mark.parametrize("places", [[0, 0, 0], [0, 1, 2], [0, 1, 0]])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_popped_tensor_that_is_changed_in_place(places, mode):
    for layers in (
        [Own(view=False), nn.Identity(), in_place("x")],
        [Both(), in_place("x"), in_place("y")],
    ):
        partitions = [nn.Sequential(layer) for layer in layers]
        devices = [CPUS[k] for k in places]
        with pytest.raises(RuntimeError, match="must not be views|must not change its input"):
            run_pipeline(partitions, devices, torch.rand(4, WIDTH), chunks=2, mode=mode)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_changed_in_place_without_grad(mode):
    partitions = [nn.Sequential(x) for x in (Own(view=False), nn.ReLU(inplace=True), Sum())]
    with pytest.raises(RuntimeError, match="must not be views"), getattr(torch, mode)():
        run_pipeline(partitions, CPUS[:3], torch.rand(4, WIDTH), chunks=2)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("devices", [CPUS[:1] * 4, CPUS], ids=["one device", "four devices"])
def test_what_shares_memory_with_nothing_any_more(devices, mode):
    """Skips share memory only with one another, or the other half of a tensor was dropped."""

    class Halves(nn.Module):
        def forward(self, x):
            return x[:, :2], x[:, 2:]

    class First(nn.Module):
        def forward(self, value):
            return value[0]

    @skippable(pop=["x", "y"])
    class Pops(nn.Module):
        def forward(self, input):
            x = yield pop("x")
            y = yield pop("y")
            return input + x + y

    for layers in (
        [Both(), nn.ReLU(inplace=True), nn.Identity(), Pops()],
        [nn.Linear(WIDTH, WIDTH), Halves(), First(), nn.ReLU(inplace=True)],
    ):
        partitions = [nn.Sequential(layer) for layer in layers]
        x = torch.randn(4, WIDTH)
        output = run_pipeline(partitions, devices, x, chunks=2, mode=mode)
        assert torch.equal(output, plain(nn.Sequential(*layers), x, 2))


def test_output_that_is_stashed_and_left_alone(mode):
    module = nn.Sequential(Own(view=True), nn.Tanh(), nn.ReLU(inplace=True), Sum())
    model = GPipe(module, [1, 1, 1, 1], devices=["cpu"] * 4, chunks=2, checkpoint=mode)
    x = torch.rand(4, WIDTH)
    assert torch.equal(model(x), plain(model.module, x, 2))
