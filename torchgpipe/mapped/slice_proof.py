"""The proof of slices: a model computes the same for a few tokens at once and in two slices.

Code that detaches what is in the cache, or looks across the whole sequence otherwise, has the same
outputs in slices, or nearly, and other gradients. So a few tokens are computed before the first
step, whole and in two slices, and gradients are compared. And outputs of the first tokens must not
change with the tokens behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.engine.unchanged import unchanged
from torchgpipe.mapped.lazy_outputs import can_fill_itself, there
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: The most tokens that a model computes for the proof, at once and in two slices.
TOKENS = 32

#: The most entries of a parameter's gradient, from the first one, that ``prove()`` compares.
SAMPLE = 4096

#: ``furthest()`` divides errors by gradients' norms, or at least by this share of the norm of all.
LEAST = 1e-3

#: The most that outputs of the first tokens may change by rounding, relative to their norm, when
#: other tokens come behind them: ``EARLY`` by data type, ``HALF_EARLY`` for half precision.
#: ``EXPERTS`` is a factor for models with experts, which then get other numbers of tokens.
EARLY = {torch.float64: 1e-9, torch.float32: 1e-5}
HALF_EARLY, EXPERTS = 1e-3, 20

#: The most that the gradient of a parameter may differ by rounding, relative to its norm: ``CLOSE``
#: by data type, ``HALF`` for half precision.
CLOSE = {torch.float64: 1e-4, torch.float32: 1e-3}
HALF = 0.2


def prove(
    model: nn.Module,
    whole: Callable[..., Any],
    slices: Callable[[], Any],
    sequence: Mapping[str, Tensor],
) -> None:
    """Check that a model's outputs and gradients are the same in slices.

    Args:
        model: the model.
        whole: computes it for a few tokens.
        slices: computes it for the same in slices.
        sequence: the argument with the tokens, by its name, which may be given to ``whole``.

    Raises:
        ValueError: they differ.
    """
    parameters = [x for x in model.parameters() if x.requires_grad and x.is_floating_point()]
    if not parameters:
        return
    name, dtype = type(model).__name__, max((x.dtype for x in parameters), key=_rounding)
    with unchanged(model):
        (expected, shapes), (again, _) = gradient(whole, parameters), gradient(whole, parameters)
        if not expected.equal(again):
            # Two equal calls differ, so layers draw random numbers: evaluation mode stops dropout.
            model.eval()
            expected, shapes = gradient(whole, parameters)
        early = changed_early(whole, sequence)
        has_experts = any("expert" in x for x, _ in model.named_modules())
        if not early <= EARLY.get(dtype, HALF_EARLY) * (EXPERTS if has_experts else 1):
            raise ValueError(
                "slices are for causal models, in which no token looks at later ones (model: "
                f"{name}, outputs of the first of {TOKENS} tokens: {early:.2%} others with other "
                "tokens behind them); use slices=1"
            )
        try:
            sliced, sliced_shapes = gradient(slices, parameters)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                "a model that is computed in slices must take the keys and values of earlier ones "
                f"(model: {name}, {TOKENS} tokens in two slices: "
                f"{type(error).__name__}: {error}); use slices=1"
            ) from error
    if any(shapes[x] != sliced_shapes[x] for x in shapes.keys() & sliced_shapes.keys()):
        raise ValueError(
            "outputs of slices must have a place for each token, by which they are joined (model: "
            f"{name}, shapes of {TOKENS} tokens: {shapes}, in two slices: {sliced_shapes}); use "
            "slices=1"
        )
    off = furthest(sliced, expected, [min(SAMPLE, x.numel()) for x in parameters])
    close = CLOSE.get(dtype, HALF)
    if not off <= close:
        raise ValueError(
            "a model that is computed in slices must have the gradients of the whole sequence "
            f"(model: {name}, {TOKENS} tokens in two slices: off by {off:.2%}, "
            f"allowed: {close:.2%}); use slices=1"
        )


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def changed_early(whole: Callable[..., Any], sequence: Mapping[str, Tensor]) -> float:
    """The change of the first tokens' outputs with the tokens behind them, per their norm.

    Rounding is the same in both, so this tells more than gradients do in half precision.
    """
    ((name, tokens),) = sequence.items()
    half = tokens.shape[1] // 2
    # The new tokens are of the same sequence, since others may not be in the vocabulary.
    others = torch.cat([tokens[:, :half], tokens.flip(1)[:, half:]], 1)
    with torch.no_grad():
        outputs = whole(), whole(**{name: others})
    first, second = (_early(output, tokens.shape[:2]) for output in outputs)
    return float((first - second).norm() / first.norm().clamp(min=1e-30))


def _early(output: Any, sizes: Sequence[int]) -> Tensor:
    """The outputs of the first tokens, on the CPU, if there are some for each token."""
    outputs = [x for x in _leaves(output) if x.shape[:2] == sizes]
    return outputs[0][:, : sizes[1] // 2].cpu().double() if outputs else torch.zeros(())


def furthest(sliced: Tensor, whole: Tensor, sizes: Sequence[int]) -> float:
    """Compare the gradients of parameters: the most that one is off, per unit of its norm.

    Args:
        sliced: samples of the gradients in slices, of all parameters.
        whole: the same of the whole sequence.
        sizes: how many numbers there are of each.
    """
    # Each error is relative to its own gradient's norm. With the norm of all, the lack of a small
    # gradient, as that of keys, would not show. LEAST is for gradients that are all rounding.
    least = LEAST * whole.norm().clamp(min=1e-30)
    pairs = zip(sliced.split([*sizes]), whole.split([*sizes]))
    errors = [(x - y).norm() / y.norm().clamp(min=least) for x, y in pairs]
    return float(torch.stack(errors).max())


def gradient(
    call: Callable[[], Any], parameters: list[nn.Parameter]
) -> tuple[Tensor, dict[Any, list[torch.Size]]]:
    """Compute the gradient of what a call returns.

    Returns:
        A sample of it, of one dimension, on the CPU; and the shapes of the outputs, by their names.
    """
    with torch.enable_grad():
        output = call()
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if loss is None:
            # Not squares: their mean is constant for normalized outputs, and its gradient zero.
            loss = next(
                x[:, x.shape[1] // 2 :].float().sin()
                for x in _leaves(output)
                if x.requires_grad and x.dim() > 1
            )
        grads = torch.autograd.grad(loss.mean(), parameters, allow_unused=True)
    parts = [
        torch.zeros(min(SAMPLE, x.numel()))
        if grad is None
        else grad.detach().flatten()[:SAMPLE].cpu()
        for x, grad in zip(parameters, grads)
    ]
    values = there(output) if can_fill_itself(output) else output
    named = values if isinstance(values, Mapping) else {"output": values}
    shapes = {name: [x.shape for x in _leaves(value)] for name, value in named.items()}
    return torch.cat([x.double() for x in parts]), shapes


def _leaves(output: Any) -> list[Tensor]:
    values = there(output) if can_fill_itself(output) else output
    return [x for x in leaves_of(values) if isinstance(x, Tensor)]
