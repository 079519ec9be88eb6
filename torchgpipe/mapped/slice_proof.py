"""The proof of slices: what a model makes of a few tokens in two slices is what it makes of them.

Code that detaches what is in the cache, or looks across the whole sequence otherwise, has the same
outputs in slices, or nearly, and other gradients. So a few tokens are computed before the first
step, whole and in two slices, and gradients are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

#: The norm of a parameter's gradient counts as this share of the norm of all, if it is smaller.
LEAST = 1e-3

#: How far gradients may differ, per unit of their norm: by rounding, in half precision, too.
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-3}
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
        try:
            found = gradient(slices, own)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                "a model that is computed in slices must take the keys and values of earlier ones "
                f"(model: {type(model).__name__}, {TOKENS} tokens in two slices: "
                f"{type(error).__name__}: {error}); use slices=1"
            ) from error
    off = furthest(found, expected, [min(SAMPLE, x.numel()) for x in own])
    close = max(CLOSE.get(x.dtype, HALF) for x in own)
    if not off <= close:
        raise ValueError(
            "a model that is computed in slices must have the gradients of the whole sequence "
            f"(model: {type(model).__name__}, {TOKENS} tokens in two slices: off by {off:.2%}, "
            f"allowed: {close:.2%}); use slices=1"
        )


def furthest(found: Tensor, expected: Tensor, sizes: Sequence[int]) -> float:
    """Compare the gradients of parameters: the most that one is off, per unit of its norm.

    Args:
        found: the samples of all parameters.
        expected: the same.
        sizes: how many numbers there are of each.
    """
    # Keys have small gradients, so that the norm of all would hide that they are detached. But of
    # some parameters, as of biases of keys, the gradient is all rounding.
    least = LEAST * expected.norm().clamp(min=1e-30)
    pairs = zip(found.split([*sizes]), expected.split([*sizes]))
    errors = [(x - y).norm() / y.norm().clamp(min=least) for x, y in pairs]
    return float(torch.stack(errors).max())


def gradient(call: Callable[[], Any], parameters: list[nn.Parameter]) -> Tensor:
    """A sample of the gradient of what a call returns, of one dimension, on the CPU."""
    with torch.enable_grad():
        output = call()
        found = output.get("loss") if isinstance(output, Mapping) else None
        if found is None:
            values = there(output) if isinstance(output, dict) else output
            # Squares of what a norm returns add up to the same number whatever goes in.
            found = next(
                x[:, x.shape[1] // 2 :].float().sin()
                for x in leaves_of(values)
                if isinstance(x, Tensor) and x.requires_grad and x.dim() > 1
            )
        grads = torch.autograd.grad(found.mean(), parameters, allow_unused=True)
    parts = [
        torch.zeros(min(SAMPLE, x.numel()))
        if grad is None
        else grad.detach().flatten()[:SAMPLE].cpu()
        for x, grad in zip(parameters, grads)
    ]
    return torch.cat([x.double() for x in parts])
