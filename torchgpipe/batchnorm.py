"""Deferred batch normalisation: running statistics of the mini-batch, not of its micro-batches.

A batch normalisation in a wrapped model normalises each micro-batch by its own mean and variance,
since the other micro-batches are not there yet. The running statistics, which evaluation uses, can
do better: a deferred batch normalisation updates them once, when all micro-batches of a mini-batch
have passed, with the mean and the variance of the whole mini-batch.

::

    micro-batch         0             1             2
                   mean, var, n  mean, var, n  mean, var, n
                        └──── merge ──┴──── merge ──┴──→ running_mean, running_var

Source of the merge: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
computing sample variances (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.recompute.phase import is_recomputing

__all__ = ["DeferredBatchNorm"]

Module = TypeVar("Module", bound=nn.Module)

if TYPE_CHECKING:
    # It is combined with a batch normalisation of one to three dimensions; all have these types.
    Base = nn.BatchNorm2d
else:
    Base = nn.Module


class Moments(NamedTuple):
    """The numbers that the statistics of a batch are computed from."""

    size: int
    """The number of values in each channel."""
    mean: Tensor
    """Their mean, of shape ``(channels,)``."""
    squares: Tensor
    """The sum of their squared distances from the mean, of shape ``(channels,)``."""

    def merged(self, other: Moments) -> Moments:
        """The moments of both batches together."""
        size = self.size + other.size
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.size / size)
        squares = self.squares + other.squares
        return Moments(size, mean, squares + delta.square() * (self.size * other.size / size))


class DeferredBatchNorm(Base):
    """A batch normalisation that updates its running statistics once per mini-batch.

    :meth:`convert_deferred_batch_norm` makes it of an :class:`nn.BatchNorm1d`,
    :class:`nn.BatchNorm2d` or :class:`nn.BatchNorm3d`. Outside of a wrapper it does what that does.
    """

    #: Whether a wrapper runs a step, and the moments of the micro-batches so far.
    _collects = False
    _moments: Moments | None = None

    @staticmethod
    def convert_deferred_batch_norm(module: Module) -> Module:
        """Make all batch normalisations in a module that have running statistics deferred.

        Only their class changes: objects, parameters, buffers, names, hooks and flags stay.

        Args:
            module: a batch normalisation, or a module with some below it.

        Returns:
            The module.

        Raises:
            TypeError: a batch normalisation is not one of torch's own plain ones.
        """
        norms = [x for x in module.modules() if isinstance(x, _torch.BatchNorm)]
        norms = [x for x in norms if x.track_running_stats and not isinstance(x, DeferredBatchNorm)]
        for norm in norms:
            if type(norm) not in DEFERRED:
                raise TypeError(
                    "only nn.BatchNorm1d, nn.BatchNorm2d and nn.BatchNorm3d can be deferred "
                    f"(layer: {type(norm).__name__}); replace the layer by one of these, or wrap "
                    "the model without deferred_batch_norm"
                )
        for norm in norms:
            norm.__class__ = DEFERRED[type(norm)]
        return module

    # The compiler would make one graph for each run of a cell, and for each number of rows.
    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        mean = self.running_mean
        if not (self._collects and self.training and mean is not None) or is_recomputing():
            return super().forward(input)
        self._check_input_dim(input)
        # With a momentum of 1, these become the mean and the variance of this micro-batch.
        mean, variance = torch.zeros_like(mean), torch.ones_like(mean)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        size = input.numel() // input.size(1)
        if size:
            with torch.no_grad():
                # The sums may exceed the range of half precision.
                wide = torch.promote_types(mean.dtype, torch.float32)
                moments = Moments(size, mean.to(wide), variance.to(wide) * (size - 1))
                self._moments = moments if self._moments is None else self._moments.merged(moments)
        return output

    def _update(self) -> None:
        if self._moments is None:
            return
        size, mean, squares = self._moments
        for tensor in (mean, squares):
            # Their memory may be that of a stream which the partition has for itself.
            # guard: recording moments
            record_stream(tensor, current_stream(tensor.device))
        momentum = self.momentum
        with torch.no_grad():
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
                if momentum is None:
                    momentum = 1 / float(self.num_batches_tracked)
            for running, new in (
                (self.running_mean, mean),
                (self.running_var, squares / (size - 1)),
            ):
                assert running is not None
                running.lerp_(new.to(running.dtype), momentum or 0.0)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # torchgpipe 0.0.7 saved these, too.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """A deferred :class:`nn.BatchNorm1d`."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """A deferred :class:`nn.BatchNorm2d`."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """A deferred :class:`nn.BatchNorm3d`."""


#: The deferred class of each class.
DEFERRED: dict[type[nn.Module], type[DeferredBatchNorm]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def deferred_batch_norms(module: nn.Module) -> list[DeferredBatchNorm]:
    """All deferred batch normalisations in a module."""
    return [norm for norm in module.modules() if isinstance(norm, DeferredBatchNorm)]


# A class and not a generator with @contextmanager, here and elsewhere around layers: through a
# generator some exceptions would not pass as they are, such as those without settable attributes.


class deferred_updates:
    """Make norms update their statistics once, after a ``with`` block, and not if it raises."""

    def __init__(self, norms: Sequence[DeferredBatchNorm]) -> None:
        self.norms = norms

    def __enter__(self) -> None:
        for norm in self.norms:
            norm._collects = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for norm in self.norms:
                    norm._update()
        finally:
            for norm in self.norms:
                norm._collects = False
                norm._moments = None
