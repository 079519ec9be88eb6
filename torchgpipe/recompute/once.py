"""State that belongs to the mini-batch, which layers update once, and not in each micro-batch.

The update before the first micro-batch comes before a step takes note of any parameter, so that
recomputations find the parameters as they are. That after the last one comes when the step is over.
Recomputations find the buffers as they were, of which there are copies: see
:mod:`torchgpipe.recompute.buffers`. Both run on the caller's streams, for which the streams of
the partitions wait, and which wait for these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.generators import computing, is_within_cell
from torchgpipe.ambient.notes import contextmanager, warn
from torchgpipe.autograd.versions import address_of, version_of
from torchgpipe.checks import verify
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.recompute.selective import uncounted
from torchgpipe.values.microbatch import Batch, gather
from torchgpipe.values.structure import map_leaves

__all__ = ["OncePerMiniBatch"]

#: The names of buffers of PyTorch's norms: warn_of_changes() does not warn if these change.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class OncePerMiniBatch(nn.Module):
    """A layer that updates state once per mini-batch, and not once per micro-batch.

    ::

        class Centre(OncePerMiniBatch):
            def __init__(self, size):
                super().__init__()
                self.register_buffer("centre", torch.zeros(size))

            def forward(self, input):
                self.give(input)
                return input - self.centre

            def after_mini_batch(self, given):
                self.centre.lerp_(given.mean(0), 0.1)

    Outside of a wrapper each call of the layer is a mini-batch, so that a plain model which calls
    the layer once does the same. State is updated without grad, and in training mode only.
    """

    def before_mini_batch(self) -> None:
        """Update parameters that require no gradient, or buffers, before the first micro-batch."""

    def after_mini_batch(self, given: Any) -> None:
        """Update buffers after the last micro-batch.

        Args:
            given: what the layer has given, with the rows of all micro-batches in order; None if
                it has given nothing.
        """

    @uncompiled
    def give(self, value: Any) -> None:
        """Give a value to :meth:`after_mini_batch`; each forward may do so once.

        Args:
            value: any nested structure of tensors with rows, which are copied.

        Raises:
            ValueError: something in it has no rows.
            RuntimeError: ``forward`` was called itself.
        """
        if not self.training or _is_again(self):
            return
        if self not in _open:
            raise RuntimeError(
                "a layer must give values in calls of the layer, and not of its forward() (layer: "
                f"{type(self).__name__}); call the layer itself"
            )
        # guard: operators of what is given
        with torch.no_grad(), uncounted():
            _open[self].values.append((computing.number, map_leaves(_copied, value)))

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer; outside of a wrapper, update its state before and after that."""
        if not self.training or _is_again(self):
            return super().__call__(*args, **kwargs)
        if self in _open:
            _open[self].calls.append(self)
            return super().__call__(*args, **kwargs)
        if is_within_cell():
            raise RuntimeError(
                "a layer with state of the mini-batch must be in the model when that is wrapped "
                f"(layer: {type(self).__name__}); make it a submodule, and wrap the model anew"
            )
        begin([self])
        with updates([self], 1):
            return self(*args, **kwargs)


class Collected:
    """The calls of a layer within a mini-batch, and what it has given."""

    def __init__(self, layer: nn.Module) -> None:
        # `calls` is a list and not a number, since threads can append to it without a lock.
        self.calls, self.values = list[nn.Module](), list[tuple[int, Any]]()
        self.buffers = {id(x) for x in layer._buffers.values()}

    def joined(self) -> Any:
        """Join what was given, in the order of the micro-batches."""
        batches = [Batch(value) for _, value in sorted(self.values, key=itemgetter(0))]
        for x in [x for batch in batches for x in batch]:
            # guard: recording what is given
            record_stream(x, current_stream(x.device))
        return gather(batches) if batches else None


#: For each layer whose mini-batch is under way: its calls so far, and what it passed to give().
_open: dict[nn.Module, Collected] = {}


def _is_again(layer: OncePerMiniBatch) -> bool:
    """Whether this thread computes a layer again.

    Raises:
        RuntimeError: a checkpoint of PyTorch does, when the layer has updated its buffers.
    """
    if is_recomputing() or _torch.graph_task() == -1:
        return is_recomputing()
    updates = type(layer).after_mini_batch is not OncePerMiniBatch.after_mini_batch
    if updates and layer not in _open:
        raise RuntimeError(
            "a checkpoint of PyTorch must not compute a layer again that has updated its state "
            f"since (layer: {type(layer).__name__}); use the checkpoint modes of a wrapper"
        )
    return True


def _copied(x: Any) -> Tensor:
    rule, remedy = "a layer must give tensors with rows", "compute from them in after_mini_batch()"
    verify(isinstance(x, Tensor) and x.dim() > 0, rule, "given", x, remedy)
    # A copy, since later layers may change the tensor itself in place.
    copy: Tensor = x.detach().clone()
    return copy


def updated_in(module: Any) -> list[OncePerMiniBatch]:
    """The layers of a module that have state of the mini-batch; none if a value is no module."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    return [x for x in modules if isinstance(x, OncePerMiniBatch)]


def begin(layers: Sequence[OncePerMiniBatch]) -> None:
    """Have layers update their state before a mini-batch, unless they are within one."""
    for layer in layers:
        if layer.training and layer not in _open and not _is_again(layer):
            with torch.no_grad():
                layer.before_mini_batch()


@contextmanager
def updates(layers: Sequence[OncePerMiniBatch], m: int = 0) -> Iterator[None]:
    """Have layers update their state after ``m`` micro-batches, and not if something raises.

    Where layers are measured, there are no micro-batches, and nothing is updated.
    """
    begun = {x: Collected(x) for x in layers if x.training and x not in _open}
    _open.update(begun.items())
    try:
        yield
        for layer, collected in begun.items() if m else ():
            if not len(collected.values) <= len(collected.calls) <= m:
                raise RuntimeError(
                    "a layer with state of the mini-batch must be called once in each micro-batch, "
                    f"and give one value then (layer: {type(layer).__name__}, micro-batches: "
                    f"{m}, calls: {len(collected.calls)}, values: {len(collected.values)}); give a "
                    "tuple, or leave the state to the layer that calls this one"
                )
            if not _is_again(layer):
                with torch.no_grad():
                    layer.after_mini_batch(collected.joined())
    finally:
        for layer in begun:
            del _open[layer]


def lasting(tensor: Tensor) -> Tensor:
    """A tensor without its graph; a copy of a buffer that may be updated after the step."""
    base = tensor if tensor._base is None else tensor._base
    is_state = any(id(base) in collected.buffers for collected in [*_open.values()])
    return tensor.detach().clone() if is_state else tensor.detach()


State: TypeAlias = dict[str, tuple[Tensor, int, int]]


def state_of(*models: Any) -> State:
    """Each persistent buffer, with its version and its address, by name.

    PyTorch's own layers count for nothing, as observers and spectral norms, nor do norms.
    """
    norms = _torch.BatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
    return {
        f"{name}.{key}".strip("."): (x, version_of(x), address_of(x))
        for model in models
        if isinstance(model, nn.Module)
        for name, layer in model.named_modules()
        if type(layer).__module__.partition(".")[0] != "torch"
        for key, x in layer._buffers.items()
        if x is not None and key not in layer._non_persistent_buffers_set
        if not (isinstance(layer, norms) and key in STATISTICS)
        # Vectors of nn.utils.spectral_norm in users' layers do not count: weight_u of weight_orig.
        if f"{key[:-2]}_orig" not in layer._parameters
    }


def warn_of_changes(before: State, wrapper: nn.Module, loss: Any, m: int) -> None:
    """Warn if a forward of ``m`` micro-batches has changed buffers, or replaced them."""
    now, kind = state_of(wrapper, loss), type(wrapper).__name__
    pairs = [(name, x, now[name]) for name, x in before.items() if name in now]
    changed = [name for name, x, y in pairs if x[0] is not y[0] or x[1:] != y[1:]]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        warn(
            f"{kind} computes micro-batches, and a buffer that layers change in forward changes "
            "once for each of them, not once per mini-batch as in the plain model (buffers: "
            f"{', '.join(changed[:3])}{more}, micro-batches: {m}); have the layer inherit from "
            "torchgpipe.OncePerMiniBatch, and change the buffer in its after_mini_batch(). If all "
            "is as you mean it, silence this by warnings.filterwarnings('ignore', "
            f"'{kind} computes micro-batches')"
        )
