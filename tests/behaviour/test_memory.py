"""Memory: how many bytes of activations are alive at once, counted by storages."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.size import some
from torchgpipe import GPipe
from torchgpipe.balance.storages import LiveStorages

LAYERS, WIDTH, ROWS, LENGTH, CHUNKS = some(8, 4), 32, 20, 24, 4


class Activations(LiveStorages):
    """A mode that counts the bytes of all storages that operators make, and their peak.

    Gradients of parameters do not count. Their size, which no activation has, tells them apart.
    """

    def __init__(self, parameters):
        super().__init__()
        self.left_out = {parameter.untyped_storage().nbytes() for parameter in parameters}
        self.peak = 0

    def add(self, inputs, output):
        super().add(inputs, output)
        self.peak = max(self.peak, sum(x for x in self.sizes() if x not in self.left_out))


def transformer():
    torch.manual_seed(0)
    return nn.Sequential(
        *[
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        ]
    )


def step(model):
    """Peak of a training step whose loss keeps nothing of its own."""
    input = torch.randn(ROWS, LENGTH, WIDTH)
    with Activations(model.parameters()) as activations:
        model(input).sum().backward()
    return activations.peak


def test_peak_of_a_transformer():
    """One of four micro-batches is alive at a time, and only the output of the others."""
    whole = step(transformer())
    peaks = {
        mode: step(GPipe(transformer(), [LAYERS], devices=["cpu"], chunks=CHUNKS, checkpoint=mode))
        / whole
        for mode in ("always", "except_last", "never")
    }
    assert 1 / CHUNKS <= peaks["always"] <= 0.27
    assert 1 / CHUNKS <= peaks["except_last"] <= 0.27
    assert 0.85 <= peaks["never"] <= 1.1, "what is not checkpointed is kept, and counted"


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_nothing_is_alive_after_a_step(checkpoint, device):
    model = GPipe(
        nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()) for _ in range(4)]),
        [2, 2],
        devices=[device] * 2,
        chunks=3,
        checkpoint=checkpoint,
    )
    refs = []

    def watch(module, inputs, output):
        refs.extend([weakref.ref(output), StorageWeakRef(output.untyped_storage())])

    for layer in model:
        layer.register_forward_hook(watch)
    gc.collect()
    gc.disable()
    try:
        loss = model(torch.rand(6, 4, device=device)).sum()
        loss.backward()
        alive = [
            ref
            for ref in refs
            if not (ref.expired() if isinstance(ref, StorageWeakRef) else ref() is None)
        ]
        assert alive == []
    finally:
        gc.enable()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_nothing_is_alive_after_a_failure(checkpoint):
    class Fail(nn.Module):
        def forward(self, x):
            if x[0, 0] > 2:
                raise KeyError
            return x

    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Fail())
    for layer in layers[:2]:
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = GPipe(layers, [1, 1, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint)
    refs = []
    for layer in layers[:2]:
        layer.register_forward_hook(
            lambda module, inputs, output: refs.append(StorageWeakRef(output.untyped_storage()))
        )
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyError):
            model(torch.arange(4.0)[:, None].expand(4, 4))
        assert len(refs) > 4
        assert [ref for ref in refs if not ref.expired()] == []
    finally:
        gc.enable()
