"""Memory: how many bytes of activations are alive at once, counted by storages."""

import torch
from torch import nn

from tests.support.live_storages import LiveStorages
from tests.support.size import some
from torchgpipe import GPipe

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
