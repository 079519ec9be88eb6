"""Models of Hugging Face's Transformers under a device map: gradients of their micro-batches."""

import copy

import pytest
import torch

from tests.support.architectures import ARCHITECTURES, build, spread
from tests.support.size import some
from torchgpipe import MappedGPipe

NAMES = [*ARCHITECTURES][: some(len(ARCHITECTURES), 5)]


def compare(name, devices, mode, chunks=2, threads=1):
    """Train a step, and compare it with the micro-batches one after another."""
    model, inputs = build(name)
    plain = copy.deepcopy(model)
    rows = [dict(zip(inputs, parts)) for parts in zip(*[x.chunk(chunks) for x in inputs.values()])]
    expected = [plain(**x) for x in rows]
    losses = torch.stack([x.loss for x in expected])
    losses.mean().backward()
    names = spread(model, devices)
    pipe = MappedGPipe(model, names, chunks=chunks, checkpoint=mode, threads=threads)
    inputs = {key: x.to(devices[0]) for key, x in inputs.items()}
    if threads > 1:
        # A first step is the caller's.
        first = copy.deepcopy(pipe.state_dict())
        with torch.no_grad():
            pipe(**inputs)
        pipe.load_state_dict(first)
    out = pipe(**inputs)
    out.loss.mean().backward()
    torch.testing.assert_close(out.loss.cpu(), losses)
    # What a caller looks at last may be computed then.
    own, *others = [x.to_tuple()[1] for x in (out, *expected)]
    torch.testing.assert_close(own.cpu(), torch.cat(others), rtol=1e-3, atol=1e-5)
    assert type(out) is type(expected[0])
    for (key, own), other in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), key
        if own.grad is not None:
            assert torch.allclose(own.grad.cpu(), other.grad, rtol=1e-3, atol=1e-6), key
    for own, other in zip(pipe.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(own.cpu(), other)


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name, mode):
    compare(name, [torch.device("cpu")] * 3, mode)
