"""Code between mapped modules must not change the state of the model, which devices share."""

import copy

import pytest
import torch
from torch import nn

from tests.support.helpers import assert_no_races
from tests.support.size import some
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe


class Model(nn.Module):
    """Three layers, with buffers that the root changes in its own way."""

    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.layers[0].register_buffer("mean", torch.zeros(4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(4, 16))
        self.change = change

    def forward(self, x):
        x = x - self.mean
        for layer in self.layers:
            x = layer(x)
        with torch.no_grad():
            self.change(self, x)
        return x


def replaced(model, x):
    model.mean = 0.5 * model.mean + 0.5 * x.mean(0)


#: How a model changes its state, and the function that an error names.
CHANGES = {
    "in place": (lambda model, x: model.mean.lerp_(x.mean(0), 0.5), "lerp_"),
    "data": (lambda model, x: model.mean.data.copy_(x.mean(0)), "copy_"),
    "entries": (lambda model, x: model.queue.__setitem__((..., slice(2)), x.T), "__setitem__"),
    "view": (lambda model, x: model.mean.view(2, 2)[1].add_(1), "add_"),
    "of a module": (lambda model, x: model.layers[0].mean.lerp_(x.mean(0), 0.5), "lerp_"),
    "parameter": (lambda model, x: model.layers[0][0].weight.mul_(0.9), "mul_"),
}


def wrapped(devices, change, **options):
    names = {"": devices[0], "layers.1": devices[1], "layers.2": devices[2]}
    return MappedGPipe(Model(change), names, chunks=4, **options)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_state_that_changes_in_place(devices, change, threads, mode):
    do, name = CHANGES[change]
    pipe = wrapped(devices, do, checkpoint=mode, threads=threads)
    message = rf"must not change parameters or buffers.*\(function: {name}, line: .*test_mapped_st"
    with pytest.raises(RuntimeError, match=message):
        pipe(torch.rand(8, 4, device=devices[0]))


def test_one_device(device, mode):
    """Nothing else uses the state at the same time."""
    do, _ = CHANGES["in place"]
    pipe = MappedGPipe(Model(do), {"": device, "layers": device}, chunks=4, checkpoint=mode)
    plain, x = copy.deepcopy(pipe.module), torch.rand(8, 4, device=device)
    expected = torch.cat([plain(rows) for rows in x.chunk(4)])
    torch.testing.assert_close(pipe(x), expected)
    torch.testing.assert_close(pipe.module.mean, plain.mean)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_buffer_that_is_replaced(devices, threads, mode):
    pipe = wrapped(devices, replaced, checkpoint=mode, threads=threads)
    plain = copy.deepcopy(pipe.module).cpu()
    x = torch.rand(8, 4)
    expected = torch.cat([plain(rows) for _ in range(2) for rows in x.chunk(4)])
    expected.square().sum().backward()
    for seed in (None, *range(some(5, 1))):
        again = copy.deepcopy(pipe)
        with observe(jitter=seed) as seen:
            # The second step may be that of several threads.
            found = torch.cat([again(x.to(devices[0])) for _ in range(2)])
            found.square().sum().backward()
        assert_no_races(seen)
        torch.testing.assert_close(found.cpu(), expected)
        torch.testing.assert_close(again.module.mean.cpu(), plain.mean)
        for own, other in zip(again.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.cpu(), other.grad)
