"""The pipeline and the loop whose times on the host are compared do the same work."""

import pytest
import torch

from benchmarks.rivals.host import PLAIN, Host
from benchmarks.rivals.library import Library
from torchgpipe import GPipe

GPT = {"name": "gpt", "vocabulary": 8, "context": 4, "layers": 1, "width": 8, "heads": 2}


def host(model, balance, mode):
    library = Library(GPipe, [torch.device("cpu")] * len(balance))
    return Host(library, model, 4, balance, PLAIN, mode)


@pytest.mark.parametrize(("model", "balance"), [(None, [1, 1]), (GPT, [2, 3])])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_gradients(model, balance, mode):
    found = host(model, balance, mode)
    found.loop()
    found.step()
    pairs = zip(found.layers.parameters(), found.pipeline.parameters(), strict=True)
    for plain, pipelined in pairs:
        torch.testing.assert_close(pipelined.grad, plain.grad)
