"""Code between mapped modules uses tensors of several devices together, and all devices overlap."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.helpers import assert_no_races
from tests.virtual.stages import ONE_MODE, Stage, limit, verify_steps
from tests.virtual.test_mapped import Chain, mapped
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.skip import pop, skippable, stash
from torchgpipe.testing import observe


class Residual(Chain):
    """The model adds the input of each block itself."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x


class InPlace(Chain):
    """The same, in place: the sum stays where the block's output is."""

    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return x


class Hourglass(Chain):
    """Features of earlier devices are concatenated, as in a U-Net."""

    def forward(self, x):
        kept = []
        half = len(self.layers) // 2
        for layer in self.layers[:half]:
            x = layer(x)
            kept.append(x)
        for layer in self.layers[half:]:
            x = layer(torch.cat([x, kept.pop()], 1).unflatten(1, (2, -1)).sum(1))
        return x


class Masked(Chain):
    """A mask that the root makes of the input, on the first device."""

    def forward(self, x):
        mask = x > 0.3
        for layer in self.layers:
            x = torch.where(mask, layer(x), 0.5)
            x[~mask] = 0.25
        return x


class Labelled(Chain):
    """The loss is computed on the last device, of labels that came in on the first one."""

    def forward(self, x):
        labels = (x * 10).long()
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x.unsqueeze(-1).expand(-1, -1, 10).mT, labels, reduction="none")


class AttentionResiduals(Chain):
    """Each block reads a mixture of all outputs before, by weights of the model's own."""

    def __init__(self, n):
        super().__init__(n)
        self.mixture = nn.Parameter(torch.rand(n, n))

    def forward(self, x):
        outputs = [x]
        for k, layer in enumerate(self.layers):
            weights = self.mixture[k, : len(outputs)].softmax(0)
            outputs.append(layer(torch.stack(outputs, -1) @ weights))
        return outputs[-1]


KINDS = [Residual, InPlace, Hourglass, Masked, Labelled, AttentionResiduals]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ONE_MODE)
def test_gradients_and_makespan(devices, kind, mode):
    n, m = 4, 8
    torch.manual_seed(0)
    plain = kind(n)
    x = torch.rand(m, 4)
    for row in x.split(1):
        plain(row.clone()).square().sum().backward()
    names = {f"layers.{k}": devices[k] for k in range(n)}
    pipe = MappedGPipe(copy.deepcopy(plain), {"": devices[0], **names}, chunks=m, checkpoint=mode)
    verify_steps(pipe, plain, x, limit(mode, n, m), (0,))


def test_statistics_stay_where_they_are(devices):
    class Normed(Chain):
        def __init__(self):
            super().__init__(2)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("variance", torch.ones(4))

        def forward(self, x):
            y = self.layers[1](self.layers[0](x))
            return F.batch_norm(y, self.mean, self.variance, training=True)

    plain = Normed()
    names = {"": devices[0], "layers.1": devices[1]}
    pipe = MappedGPipe(copy.deepcopy(plain), names, chunks=2)
    x = torch.rand(4, 4)
    expected = torch.cat([plain(rows) for rows in x.chunk(2)])
    torch.testing.assert_close(pipe(x).cpu(), expected)
    for own, other in zip(pipe.buffers(), plain.buffers()):
        torch.testing.assert_close(own.cpu(), other)


def message_of(device, forward):
    """Return what code between the modules raises."""
    model = Chain(2)
    model.forward = forward.__get__(model)
    pipe = mapped(model, device[:2], "never", 2)
    with pytest.raises(RuntimeError) as caught:
        pipe(torch.rand(4, 4, device=device[0]))
    return str(caught.value)


def test_what_cannot_be_brought_together(devices):
    def mixing(self, x):
        return self.layers[1](x) + torch.ones(2, 4)

    message = message_of(devices, mixing)
    assert f"{__file__}:{mixing.__code__.co_firstlineno + 1}" in message
    assert "devices: virtual:1, cpu); move them there by .to()" in message


def test_changes_in_place_that_would_be_lost(devices):
    def renorming(self, x):
        table = torch.rand(3, 4, device=x.device)
        numbers = self.layers[1](x).long()
        return F.embedding(numbers, table, max_norm=0.1)

    message = message_of(devices, renorming)
    assert "changes one of another device in place (function: embedding" in message


class Product(torch.autograd.Function):
    """A function that combines its tensors in both directions."""

    @staticmethod
    def forward(ctx, x, name, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, None, gradient * x


class First(Product):
    """A function that returns one tensor, and takes the other's gradient for its own."""

    @staticmethod
    def forward(ctx, x, name, y):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, gradient


class Apart(First):
    """A function whose gradients are on the devices of its tensors."""

    @staticmethod
    def forward(ctx, x, name, y):
        ctx.save_for_backward(y)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient, None, 2 * y


class Applied(Chain):
    """The model applies a function to tensors of two devices."""

    def __init__(self, function, near=False, labels=False):
        super().__init__(2)
        self.function, self.near, self.labels = function, near, labels

    def forward(self, x):
        if self.labels:
            return self.function.apply(self.layers[1](self.layers[0](x)), "name", x)
        x = self.layers[0](x)
        y = self.layers[1](x)
        return self.function.apply(x.to(y.device) if self.near else x, "name", y)


@pytest.mark.parametrize(
    ("function", "labels"), [(Product, False), (Product, True), (First, False)]
)
@pytest.mark.parametrize("mode", ONE_MODE)
def test_functions_whose_backward_combines_devices(devices, mode, function, labels):
    pipe = mapped(Applied(function, labels=labels), devices[:2], mode, 2)
    with pytest.raises(RuntimeError) as caught:
        pipe(torch.rand(4, 4, device=devices[0])).sum().backward()
    assert re.match(
        r"Expected all tensors to be on the same device|Function FirstBackward returned an invalid "
        r"gradient at index \d - expected device virtual:1 but got virtual:0",
        str(caught.value),
    )


@pytest.mark.parametrize("function", [Product, First, Apart])
@pytest.mark.parametrize("mode", ONE_MODE)
def test_functions_whose_backward_goes_with_their_devices(devices, mode, function):
    near = function is not Apart
    plain = Applied(function, near)
    pipe = mapped(copy.deepcopy(plain), devices[:2], mode, 2)
    x = torch.rand(4, 4)
    for rows in x.chunk(2):
        plain(rows).square().sum().backward()
    with observe(jitter=0) as seen:
        pipe(x.to(devices[0])).square().sum().backward()
    assert_no_races(seen)
    for own, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad)


# The same as skips: a layer hands all outputs before it on, and reads them all.


def reading(k, n):
    """A layer that reads the outputs of all layers before it, and stashes its own."""

    @skippable(stash=[f"{k}→{j}" for j in range(k + 1, n)], pop=[f"{i}→{k}" for i in range(k)])
    class Reading(Stage):
        def forward(self, x):
            for i in range(k):
                x = x + (yield pop(f"{i}→{k}"))
            y = super().forward(x)
            for j in range(k + 1, n):
                yield stash(f"{k}→{j}", y)
            return y

    return Reading()


@pytest.mark.parametrize("mode", ONE_MODE)
def test_blocks_that_read_all_outputs_before_them_as_skips(devices, mode):
    n, m = 4, 8
    torch.manual_seed(0)
    layers = nn.Sequential(*[reading(k, n) for k in range(n)])
    pipe = GPipe(layers, [1] * n, devices=devices[:n], chunks=m, checkpoint=mode)
    x = torch.rand(m, 4, device=devices[0])
    with observe() as seen:
        pipe(x).sum().backward()
    assert_no_races(seen)
    assert seen.makespan == limit(mode, n, m)
