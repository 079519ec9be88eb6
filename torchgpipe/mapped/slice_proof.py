"""The proof of slices: what a model makes of a few tokens in two slices is what it makes of them.

Code that detaches what is in the cache, or looks across the whole sequence otherwise, has the same
outputs in slices, or nearly, and other gradients. So a few tokens are computed before the first
step, whole and in two slices, and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.mapped.on_demand import there
from torchgpipe.planner.blocks import unchanged
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: So many tokens are computed.
TOKENS = 32

#: So many numbers of the gradient of each parameter are compared.
SAMPLE = 4096

#: How far gradients may differ, per unit of their norm: by rounding, in half precision, too.
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-2}
HALF = 0.2


def prove(model: nn.Module, whole: Callable[[], Any], slices: Callable[[], Any]) -> None:
    """Check that a model's gradients are the same in slices.

    Args:
        model: the model.
        whole: computes it for a few tokens.
        slices: computes it for the same in slices.

    Raises:
        ValueError: they differ.
    """
    own = [x for x in model.parameters() if x.requires_grad and x.is_floating_point()]
    if not own:
        return
    with unchanged(model):
        expected, again = gradient(whole, own), gradient(whole, own)
        if not expected.equal(again):
            # Layers that draw are left out, since slices draw other numbers.
            model.eval()
            expected = gradient(whole, own)
        found = gradient(slices, own)
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    close = max(CLOSE.get(x.dtype, HALF) for x in own)
    if not error <= close:
        raise ValueError(
            "a model that is computed in slices must have the gradients of the whole sequence "
            f"(model: {type(model).__name__}, {TOKENS} tokens in two slices: off by {error:.0%}, "
            f"allowed: {close:.1%}); use slices=1"
        )


def gradient(call: Callable[[], Any], parameters: list[nn.Parameter]) -> Tensor:
    """A sample of the gradient of what a call returns, of one dimension, on the CPU."""
    with torch.enable_grad():
        output = call()
        found = output.get("loss") if isinstance(output, Mapping) else None
        if found is None:
            values = there(output) if isinstance(output, dict) else output
            # Squares of what a norm returns add up to the same number whatever goes in.
            found = next(
                x.float().sin()
                for x in leaves_of(values)
                if isinstance(x, Tensor) and x.requires_grad
            )
        grads = torch.autograd.grad(found.mean(), parameters, allow_unused=True)
    parts = [
        torch.zeros(min(SAMPLE, x.numel()))
        if grad is None
        else grad.detach().flatten()[:SAMPLE].cpu()
        for x, grad in zip(parameters, grads)
    ]
    return torch.cat([x.double() for x in parts])
