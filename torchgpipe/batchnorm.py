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

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.checks import verify, verify_number
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.partition.arguments import checked_count, verify_a_module
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.recompute.selective import uncounted
from torchgpipe.skip.skippable import picklable

__all__ = ["DeferredBatchNorm"]

Module = TypeVar("Module", bound=nn.Module)

if TYPE_CHECKING:
    Base = nn.BatchNorm2d
else:
    # The base class of all batch normalisations has no public name.
    Base = nn.BatchNorm2d.__base__


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
    :class:`nn.BatchNorm2d` or :class:`nn.BatchNorm3d`. The constructor makes one for inputs of
    shape ``(rows, features, ...)``, with any number of further dimensions.

    Within any wrapper, the layer updates its statistics once per step, whatever ``chunks`` is: the
    wrapper knows its micro-batches. Outside of a wrapper, the layer takes every ``chunks`` runs in
    training for one mini-batch, as in 0.0.7; by default each run, as a plain layer does.

    Args:
        num_features: the number of features, or channels.
        eps: see :class:`nn.BatchNorm2d`.
        momentum: the same.
        affine: the same.
        chunks: the number of runs that are one mini-batch outside of a wrapper.

    Raises:
        ValueError: chunks is out of range.
    """

    #: How many forwards in training are one mini-batch, outside of a wrapper.
    chunks = 1
    #: Whether a wrapper runs a step now, at whose end it updates the running statistics.
    _collects = False
    #: The moments of all micro-batches so far of the present mini-batch; None before any.
    _moments: Moments | None = None
    #: How many of the `chunks` forwards of a mini-batch have run, outside of a wrapper.
    _runs = 0

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int = 1,
    ) -> None:
        rule, remedy = "num_features must be a number of features", "pass the size of dimension 1"
        valid = type(num_features) is int and num_features >= 0
        verify(valid, rule, "num_features", num_features, remedy)
        verify_number(eps, "eps must be a number that is not negative", "eps", "pass 1e-5")
        if momentum is not None:
            rule, remedy = "momentum must be a share, or None for the mean of all", "pass 0.1"
            verify_number(momentum, rule, "momentum", remedy)
        super().__init__(num_features, eps, momentum, affine)
        self.chunks = _checked(chunks)

    @staticmethod
    def convert_deferred_batch_norm(module: Module, chunks: int = 1) -> Module:
        """Make all batch normalisations in a module that have running statistics deferred.

        Only their class changes: objects, parameters, buffers, names, hooks and flags stay.

        Args:
            module: a batch normalisation, or a module with some below it.
            chunks: the number of runs that are one mini-batch outside of a wrapper. A wrapper knows
                its number of micro-batches, and needs none.

        Returns:
            The module.

        Raises:
            TypeError: a batch normalisation has a forward of its own, as
                :class:`nn.SyncBatchNorm` has, is lazy or is parametrised.
            ValueError: chunks is out of range.
        """
        verify_a_module(module, "module")
        number = _checked(chunks)
        defer(module)
        for norm in deferred_batch_norms(module):
            norm.chunks = number
        return module

    # torch.compile would make a graph for each micro-batch of a mini-batch and each number of rows.
    @uncompiled
    def forward(self, input: Tensor) -> Tensor:
        mean = self.running_mean
        collects = self._collects or self.chunks > 1
        if not (collects or is_recomputing()) or not self.training or mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        with uncounted():
            # At momentum 1, batch_norm() overwrites both tensors with the micro-batch's statistics.
            mean, variance = torch.zeros_like(mean), torch.ones_like(mean)
        output = F.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if is_recomputing():
            return output
        size = input.numel() // input.size(1)
        if size:
            # guard: operators of one run
            with torch.no_grad(), uncounted():
                # The sum of squares may exceed the range of half precision.
                wide = torch.promote_types(mean.dtype, torch.float32)
                moments = Moments(size, mean.to(wide), variance.to(wide) * (size - 1))
                self._moments = moments if self._moments is None else self._moments.merged(moments)
        if not self._collects:
            self._runs += 1
            if self._runs == self.chunks:
                self._update()
                self._forget()
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                "the input must have at least 2 dimensions "
                f"(input: {tuple(input.shape)}); give it one with unsqueeze(0)"
            )

    def _forget(self) -> None:
        self._moments, self._runs = None, 0

    def _update(self) -> None:
        if self._moments is None:
            return
        size, mean, squares = self._moments
        for tensor in (mean, squares):
            # The moments were made on the compute stream of the partition. Their memory must not be
            # used again before the current stream has read them.
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
        # State dicts of torchgpipe 0.0.7 have two further keys, which would count as unexpected.
        for name in ("sum", "sum_squares"):
            state_dict.pop(prefix + name, None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@cache
def deferred(cls: Any) -> Any:
    """The deferred class of a class of batch normalisations."""
    members = {"__init__": cls.__init__, "_check_input_dim": cls._check_input_dim}
    members |= {"__module__": cls.__module__, "__doc__": f"A deferred :class:`{cls.__name__}`."}
    made = type(f"Deferred{cls.__name__}", (DeferredBatchNorm, cls), members)
    return picklable(made, deferred, cls)


def defer(module: nn.Module) -> None:
    """Make all batch normalisations in a module deferred that are not yet, or none of them.

    Raises:
        TypeError: one of them cannot be deferred.
    """
    norms = {
        name: norm
        for name, norm in module.named_modules()
        if isinstance(norm, _torch.BatchNorm)
        and norm.track_running_stats
        and not isinstance(norm, DeferredBatchNorm)
    }
    for name, norm in norms.items():
        if why := _obstacle(norm):
            raise TypeError(
                "only what runs the forward of nn.BatchNorm1d, 2d or 3d can be deferred "
                f"(layer: {name + ', ' if name else ''}{type(norm).__name__}, {why}"
            )
    for norm in norms.values():
        cls: Any = type(norm)
        norm.__class__ = deferred(cls)


def has_batch_norms(module: nn.Module) -> bool:
    """Whether a module has any batch normalisation."""
    return any(isinstance(x, Base) for x in module.modules())


def _obstacle(norm: nn.Module) -> str | None:
    """The reason why a batch normalisation cannot be deferred, and the remedy."""
    if isinstance(norm, nn.SyncBatchNorm):
        return (
            "which exchanges statistics with other processes in every forward); wrap the model "
            "without deferred_batch_norm, or keep the layer that this one was converted from"
        )
    if isinstance(norm, LazyModuleMixin):
        return "whose size nobody knows yet); run the model once before"
    if is_parametrized(norm):
        # remove_parametrizations() gives a layer the first base of its class. That would be
        # DeferredBatchNorm, and not the layer's own class.
        return (
            "whose class belongs to a parametrisation); convert it first, and parametrise it then"
        )
    if getattr(norm.forward, "__func__", None) is not nn.BatchNorm1d.forward:
        return (
            "which has a forward of its own); inherit forward from nn.BatchNorm1d, 2d or 3d, or "
            "wrap the model without deferred_batch_norm"
        )
    return None


def _checked(chunks: int) -> int:
    things = "runs that are one mini-batch outside of a wrapper"
    return checked_count(chunks, "chunks", things, "leave it out where all runs are in a wrapper")


def deferred_batch_norms(module: nn.Module) -> list[DeferredBatchNorm]:
    """All deferred batch normalisations in a module."""
    return [norm for norm in module.modules() if isinstance(norm, DeferredBatchNorm)]


@contextmanager
def deferred_updates(norms: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """Make norms update their statistics once, after a ``with`` block, and not if it raises."""
    for norm in norms:
        norm._forget()
        norm._collects = True
    try:
        yield
        for norm in norms:
            norm._update()
    finally:
        for norm in norms:
            norm._collects = False
            norm._forget()
