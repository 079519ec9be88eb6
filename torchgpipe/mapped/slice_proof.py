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

from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.on_demand import there
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: So many tokens are computed.
TOKENS = 32

#: So many numbers of the gradient of each parameter are compared.
SAMPLE = 4096

#: By dtype: how far the gradient of a parameter may be off, per unit of its norm, and which share
#: of the norm of all gradients is no more than rounding.
CLOSE = {torch.float64: (1e-4, 1e-9), torch.float32: (2e-2, 1e-6)}
HALF = 0.3, 1e-2


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
        if not all(x.equal(y) for x, y in zip(expected, again)):
            # Layers that draw are left out, since slices draw other numbers.
            model.eval()
            expected = gradient(whole, own)
        found = gradient(slices, own)
    close, rounding = max(CLOSE.get(x.dtype, HALF) for x in own)
    least = rounding * torch.cat(expected).norm()
    errors = [
        float((y - x).norm() / x.norm().clamp(min=least)) if (y - x).norm() > least else 0.0
        for x, y in zip(expected, found)
    ]
    if not max(errors) <= close:
        names = {x: name for name, x in model.named_parameters()}
        raise ValueError(
            "a model that is computed in slices must have the gradients of the whole sequence "
            f"(model: {type(model).__name__}, {TOKENS} tokens in two slices, gradient of "
            f"{names[own[errors.index(max(errors))]]}: off by {max(errors):.0%}, allowed: "
            f"{close:.1%}); use slices=1"
        )


def gradient(call: Callable[[], Any], parameters: list[nn.Parameter]) -> list[Tensor]:
    """A sample of the gradients of what a call returns, on the CPU."""
    with torch.enable_grad():
        output = call()
        found = output.get("loss") if isinstance(output, Mapping) else None
        if found is None:
            values = there(output) if isinstance(output, dict) else output
            found = next(
                x.float().square()
                for x in leaves_of(values)
                if isinstance(x, Tensor) and x.requires_grad
            )
        grads = torch.autograd.grad(found.mean(), parameters, allow_unused=True)
    parts = [x.new_zeros(x.shape) if grad is None else grad for x, grad in zip(parameters, grads)]
    return [x.detach().flatten()[:SAMPLE].cpu().double() for x in parts]
