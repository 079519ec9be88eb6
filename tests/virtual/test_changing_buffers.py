"""Buffers that layers change in their forward, on streams."""

import copy

import pytest
import torch

from tests.support.changing_buffers import LAYERS, changing
from tests.support.helpers import MODES, assert_no_races, plain, wrap
from torchgpipe.testing import observe

M = 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_buffers_are_those_of_the_plain_model(devices, name, place, mode):
    module = changing(name)
    model = wrap(copy.deepcopy(module), [devices[k] for k in place], mode, M, balance=[2, 2, 2])
    x = torch.randn(8, 4)
    for step in range(1, 4):
        outputs = [plain(module, x * step, M)]
        with observe() as seen:
            outputs.append(model((x * step).to(devices[0])))
            outputs[-1].square().sum().backward()
        outputs[0].square().sum().backward()
        assert_no_races(seen)
        torch.testing.assert_close(outputs[0], outputs[1].cpu())
        for a, b in zip(module.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad.cpu())
        for a, b in zip(module.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(a, b.cpu())
