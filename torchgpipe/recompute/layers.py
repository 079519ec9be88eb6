"""What the layers are made of in a step: a second run finds it as the first did, and leaves it so.

Between a forward and its backward a layer can be switched to eval mode, or be rid of its hooks, and
its parameters can be frozen, replaced (``torch.func.functional_call`` puts them back as soon as the
forward is over) or changed in place. And a second run must not count twice in the running
statistics of a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchgpipe.autograd.phony import get_phony
from torchgpipe.partition.sharding import exchanged, is_shard

__all__: list[str] = []

_MISSING: Any = object()

#: A tensor whose versions nobody counts.
with torch.inference_mode():
    _UNCOUNTED = torch.empty(0)

#: The buffers of torch's own norms.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Found(NamedTuple):
    """What layers have at one time."""

    training: list[bool]
    hooks: list[dict[int, Any]]
    needs_grad: list[bool]
    tensors: list[Tensor | None]


class LayersState:
    """The training flags, forward hooks, parameters and buffers that layers have now.

    Args:
        layers: a partition.

    Raises:
        TypeError: a layer is scripted.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._modules = list(layers.modules())
        self._parameters: list[Tensor] = []
        #: Where parameters and buffers are held.
        self._places: list[tuple[dict[str, Any], str]] = []
        self._hook_tables: list[dict[int, Any]] = []
        self._hooks: list[dict[int, Any]] = []
        self._norms: list[nn.Module] = []
        #: What they update when they run again: where, and a copy of what is there.
        self._copies: list[tuple[dict[str, Any], str, Tensor]] | None = None
        #: Whether there are hooks that are to be called after whatever happens.
        self.always_calls = False
        #: The identities of all parameters and buffers.
        self.lasting: set[int] = set()
        others = exchanged(self._modules)
        for module in self._modules:
            if not isinstance(module._parameters, dict):
                raise TypeError(
                    "under checkpointing, a layer must not be scripted, since it saves otherwise "
                    "when it has been optimised, in its third run "
                    f"(layer: {type(module).__name__}); use checkpoint='never', or torch.compile"
                )
            parameters = [x for x in module._parameters.values() if x is not None]
            if module in others:
                # Of a whole parameter the memory comes and goes: only its shard tells of changes.
                self._parameters += filter(is_shard, parameters)
                tables = [module._buffers]
            else:
                self._parameters += parameters
                # Buffers are tensors or None, as parameters are.
                tables = [module._parameters, module._buffers]  # type: ignore[list-item]
            for table in tables:
                self._places += [(table, name) for name in table]
                self.lasting |= {id(x) for x in table.values() if x is not None}
            self.always_calls |= bool(module._forward_hooks_always_called)
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                self._norms.append(module)
        self._found = self._read()
        self._versions: list[tuple[int, ...]] | None = None

    def settle(self) -> None:
        """From now on, until the layers run again, parameters must not be changed in place."""
        if self._versions is None:
            # Not before the layers have run: lazy ones have hooks until then.
            self._hook_tables = [table for x in self._modules for table in _forward_hooks(x)]
            # In place: it is what was found, too.
            self._hooks[:] = map(dict, self._hook_tables)
        self._versions = _identities(self._parameters)

    def restored(self) -> Restored:
        """Restores what there was within a ``with`` block, and then what there was before it.

        Meanwhile norms update copies of their running statistics.

        Raises:
            RuntimeError: a parameter has been changed in place by others than the layers.
        """
        if self._versions is not None and self._versions != _identities(self._parameters):
            raise self._changed()
        return Restored(self)

    def put_back(self) -> Found:
        """Puts back what there was; returns what there is."""
        now = self._read()
        try:
            self._write(self._found, now)
            if self._copies is None:
                # Once: to what torch's own norms compute in training, the values are nothing.
                self._copies = [
                    (norm._buffers, name, buffer.clone())
                    for norm in self._norms
                    for name in STATISTICS
                    if (buffer := norm._buffers.get(name)) is not None
                ]
            for buffers, name, copy in self._copies:
                buffers[name] = copy
        except BaseException:
            self._write(now, self._read())
            raise
        return now

    def leave(self, found: Found) -> None:
        """Settles, and puts back what :meth:`put_back` returned."""
        try:
            self.settle()
            self._write(found, self._read())
        except BaseException:
            # Where Ctrl-C came in between.
            self._write(found, self._read())
            raise

    def _read(self) -> Found:
        return Found(
            [module.training for module in self._modules],
            # Copies only where something has changed.
            self._hooks if self._hook_tables == self._hooks else [*map(dict, self._hook_tables)],
            [parameter.requires_grad for parameter in self._parameters],
            [table.get(name, _MISSING) for table, name in self._places],
        )

    def _write(self, found: Found, now: Found) -> None:
        # Comparing is faster than setting.
        if now.training != found.training:
            for module, training in zip(self._modules, found.training):
                module.training = training
        # guard: hooks of the forward
        if now.hooks != found.hooks:
            for hooks, table in zip(found.hooks, self._hook_tables):
                table.clear()
                table.update(hooks)
        if now.needs_grad != found.needs_grad:
            for parameter, needs_grad in zip(self._parameters, found.needs_grad):
                parameter.requires_grad_(needs_grad)
        if not all(map(is_, now.tensors, found.tensors)):
            for (place, name), tensor in zip(self._places, found.tensors):
                if tensor is not _MISSING:
                    place[name] = tensor
                else:
                    place.pop(name, None)

    def _changed(self) -> RuntimeError:
        for parameter, version in zip(self._parameters, self._versions or ()):
            (found,) = _identities([parameter])
            if found != version:
                break
        rule = (
            "under checkpointing, parameters must not be changed in place between a forward and "
            f"its backward, which computes the forward again (shape: {tuple(parameter.shape)}, "
        )
        if found[0] == version[0]:
            return RuntimeError(
                f"{rule}now in other memory); replace no parameter's data before backward, and "
                "leave fully_shard's reshard_after_forward as it is by default"
            )
        return RuntimeError(
            f"{rule}version: {found[0]}, expected version: {version[0]}); run backward before "
            "optimizer.step(), and before the next forward of layers that change their parameters "
            "themselves"
        )


class Restored:
    """The state of layers as it was, within a ``with`` block.

    A class, as others are that are entered for each cell: contextmanager takes longer.
    """

    def __init__(self, state: LayersState) -> None:
        self.state = state

    def __enter__(self) -> None:
        self.found = self.state.put_back()

    def __exit__(self, *_: object) -> None:
        self.state.leave(self.found)


class unchanged:
    """Checks that what every micro-batch gets whole is not changed within a ``with`` block.

    Raises:
        RuntimeError: a tensor was changed in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __enter__(self) -> None:
        self.versions = [version_of(tensor) for tensor in self.tensors]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # guard: versions of what goes whole
        if kind is None and self.versions != [version_of(tensor) for tensor in self.tensors]:
            raise RuntimeError(
                "what every micro-batch gets whole must not be changed in place, since others get "
                f"it, too (shapes: {[tuple(tensor.shape) for tensor in self.tensors]}); clone it "
                "in the layer that changes it"
            )


def _identities(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Their versions, and where their values are: ``parameter.data = ...`` puts them elsewhere."""
    try:
        return [(x._version, x.data_ptr()) for x in parameters]
    except (RuntimeError, ValueError, NotImplementedError):
        # Some sort of parameter is nowhere, such as sparse and lazy ones.
        return [(version_of(x), *_place(x)) for x in parameters]


def _place(tensor: Tensor) -> tuple[int, ...]:
    try:
        return (tensor.data_ptr(),)
    except (RuntimeError, ValueError, NotImplementedError):
        return ()


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, -1 if nobody counts that."""
    try:
        return tensor._version
    except RuntimeError:
        # Inference tensors do not.
        return -1


def counter_of(tensor: Tensor) -> Tensor:
    """Has the versions of a tensor, and of all views of its memory, but does not hold that."""
    if tensor.is_inference():
        return _UNCOUNTED
    counter = tensor.detach()
    # Sparse tensors and those of functorch refuse. Their memory is held.
    with suppress(RuntimeError):
        counter.data = get_phony(tensor.device, requires_grad=False)
    return counter


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]
