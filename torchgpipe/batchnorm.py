"""Deferred batch normalisation: running statistics of the mini-batch, not of its micro-batches.

A batch normalisation in a wrapped model normalises each micro-batch by its own mean and variance,
since the others are not there yet. But the running statistics, which evaluation uses, need not
suffer: here they are updated once, when the last micro-batch of the mini-batch has come by, with
the mean and the variance of all of them together.

::

    micro-batch         0             1             2
                   mean, var, n  mean, var, n  mean, var, n
                        └──── merge ──┴──── merge ──┴───→ running_mean, running_var

Source of the merge: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
computing sample variances (1979).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from torchgpipe.checkpoint import is_recomputing

__all__ = ["DeferredBatchNorm"]

Module = TypeVar("Module", bound=nn.Module)


class Moments(NamedTuple):
    """What the statistics of a batch are computed from."""

    size: int
    """How many values each channel has."""
    mean: Tensor
    """Their mean, of shape ``(channels,)``."""
    squares: Tensor
    """The sum of their squared distances from the mean, of shape ``(channels,)``."""

    def merged(self, other: Moments) -> Moments:
        """Those of both batches together."""
        size = self.size + other.size
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.size / size)
        squares = self.squares + other.squares
        return Moments(size, mean, squares + delta.square() * (self.size * other.size / size))


class DeferredBatchNorm(_BatchNorm):
    """A batch normalisation that updates its running statistics once per mini-batch.

    It takes the place of an :class:`nn.BatchNorm1d`, :class:`nn.BatchNorm2d` or
    :class:`nn.BatchNorm3d` by :meth:`convert_deferred_batch_norm`. Outside of a wrapper it does
    what that does.
    """

    #: What it was converted from.
    converted_from: type[_BatchNorm]
    #: How many micro-batches the mini-batch has, how many have come by, and what they add up to.
    _due: int
    _seen: int
    _moments: Moments | None

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module) -> Module:
        """Makes deferred ones of all batch normalisations in a module that have statistics.

        Parameters, buffers, names, hooks and training flags stay the same objects.

        Args:
            module: a batch normalisation, or a module with some below it, which are replaced.

        Returns:
            The module, or what takes its place.

        Raises:
            TypeError: a batch normalisation is not one of torch's own plain ones.
        """
        found: Module = _convert(module, {})
        return found

    def _begin(self, micro_batches: int) -> None:
        self._due = micro_batches
        self._seen = 0
        self._moments = None

    def _check_input_dim(self, input: Tensor) -> None:
        self.converted_from._check_input_dim(self, input)

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and self.track_running_stats) or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        # With a momentum of 1, they become those of this micro-batch.
        mean, variance = torch.zeros_like(self.running_mean), torch.ones_like(self.running_mean)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if not is_recomputing():
            with torch.no_grad():
                size = input.numel() // input.size(1)
                self._track(Moments(size, mean, variance * (size - 1)) if size else None)
        return output

    def _track(self, moments: Moments | None) -> None:
        if moments is not None:
            self._moments = moments if self._moments is None else self._moments.merged(moments)
        self._seen += 1
        if self._seen == self._due:
            whole = self._moments
            self._begin(self._due)
            if whole is not None:
                self._update(whole.mean, whole.squares / (whole.size - 1))

    def _update(self, mean: Tensor, variance: Tensor) -> None:
        buffers: Any = self
        momentum = self.momentum
        if buffers.num_batches_tracked is not None:
            buffers.num_batches_tracked.add_(1)
        if momentum is None:
            momentum = 1 / float(buffers.num_batches_tracked)
        buffers.running_mean.lerp_(mean, momentum)
        buffers.running_var.lerp_(variance, momentum)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # What torchgpipe 0.0.7 saved besides.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def deferred_batch_norms(module: nn.Module) -> list[DeferredBatchNorm]:
    """Those in a module."""
    return [norm for norm in module.modules() if isinstance(norm, DeferredBatchNorm)]


@contextmanager
def one_mini_batch(norms: Sequence[DeferredBatchNorm], micro_batches: int) -> Iterator[None]:
    """Has norms take what they see within a ``with`` block for the parts of one mini-batch."""
    for norm in norms:
        norm._begin(micro_batches)
    try:
        yield
    finally:
        # Also after an exception, which some micro-batches did not live to see.
        for norm in norms:
            norm._begin(1)


def _convert(module: Any, converted: dict[nn.Module, nn.Module]) -> Any:
    if module in converted:
        return converted[module]
    converted[module] = module
    if isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm):
        if type(module).forward is not _BatchNorm.forward or isinstance(module, LazyModuleMixin):
            raise TypeError(
                "only nn.BatchNorm1d, nn.BatchNorm2d and nn.BatchNorm3d can be deferred (layer: "
                f"{type(module).__name__}); replace the layer by one of these, or wrap the model "
                "without deferred_batch_norm"
            )
        if module.track_running_stats:
            deferred: DeferredBatchNorm = DeferredBatchNorm.__new__(DeferredBatchNorm)
            deferred.__dict__.update(module.__dict__)
            deferred.converted_from = type(module)
            deferred._begin(1)
            converted[module] = deferred
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _convert(child, converted)
    return converted[module]
