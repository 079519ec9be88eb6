"""What the layers are made of in a step: a second run finds it as the first did, and leaves it so.

Between a forward and its backward a layer can be switched to eval mode, or be rid of its hooks, and
its parameters can be frozen, replaced (``torch.func.functional_call`` puts them back as soon as the
forward is over) or changed in place. And a second run must not count twice in the running
statistics of a norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

__all__: list[str] = []

_MISSING: Any = object()

#: The buffers of torch's own norms.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class LayersState:
    """The training flags, forward hooks, parameters and buffers that layers have now.

    Args:
        layers: a partition.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._flags: list[tuple[nn.Module, bool]] = []
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self._needs_grad: list[tuple[Tensor, bool]] = []
        self._tensors: list[tuple[dict[str, Any], str, Tensor | None]] = []
        self._versions: list[tuple[int, int]] | None = None
        self._norms: list[nn.Module] = []
        #: The identities of all parameters and buffers.
        self._lasting: set[int] = set()
        for module in layers.modules():
            self._flags.append((module, module.training))
            for name, parameter in module._parameters.items():
                self._tensors.append((module._parameters, name, parameter))
                if parameter is not None:
                    self._needs_grad.append((parameter, parameter.requires_grad))
                    self._lasting.add(id(parameter))
            for name, buffer in module._buffers.items():
                self._tensors.append((module._buffers, name, buffer))
                if buffer is not None:
                    self._lasting.add(id(buffer))
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                self._norms.append(module)
        needs_grad = [needs for _, needs in self._needs_grad]
        #: Whether there are parameters, and none needs a gradient.
        self.frozen = bool(needs_grad) and not any(needs_grad)

    def lasts(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer, or a view of one, and stays in memory."""
        return id(tensor) in self._lasting or id(tensor._base) in self._lasting

    def settle(self) -> None:
        """From now on, until the layers run again, parameters must not be changed in place."""
        if self._versions is None:
            # Not before the layers have run: lazy ones have hooks until then.
            for module, _ in self._flags:
                self._hooks += [(hooks, dict(hooks)) for hooks in _forward_hooks(module)]
        self._versions = [_identity(parameter) for parameter, _ in self._needs_grad]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores what there was within a ``with`` block, and then what there was before it.

        Meanwhile norms update copies of their running statistics.

        Raises:
            RuntimeError: a parameter has been changed in place by others than the layers.
        """
        for (parameter, _), version in zip(self._needs_grad, self._versions or ()):
            if _identity(parameter) != version:
                raise RuntimeError(
                    "under checkpointing, parameters must not be changed in place between a "
                    "forward and its backward, which computes the forward again (shape: "
                    f"{tuple(parameter.shape)}, version: {version_of(parameter)}, expected "
                    f"version: {version[0]}); run backward before optimizer.step(), and before the "
                    "next forward of layers that change their parameters themselves"
                )
        flags = [(module, module.training) for module, _ in self._flags]
        hooks = [(table, dict(table)) for table, _ in self._hooks]
        needs_grad = [(parameter, parameter.requires_grad) for parameter, _ in self._needs_grad]
        tensors = [(table, name, table.get(name, _MISSING)) for table, name, _ in self._tensors]
        try:
            _set_flags(self._flags)
            _set_hooks(self._hooks)
            _set_requires_grad(self._needs_grad)
            _set_tensors(self._tensors)
            for norm in self._norms:
                for name in STATISTICS:
                    buffer = norm._buffers.get(name)
                    if buffer is not None:
                        norm._buffers[name] = buffer.clone()
            yield
            self.settle()
        finally:
            _set_tensors(tensors)
            _set_requires_grad(needs_grad)
            _set_hooks(hooks)
            _set_flags(flags)


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Checks that what every micro-batch gets whole is not changed within a ``with`` block.

    Raises:
        RuntimeError: a tensor was changed in place.
    """
    versions = [version_of(tensor) for tensor in tensors]
    yield
    if versions != [version_of(tensor) for tensor in tensors]:
        raise RuntimeError(
            "what every micro-batch gets whole must not be changed in place, since others get it, "
            f"too (shapes: {[tuple(tensor.shape) for tensor in tensors]}); clone it in the layer "
            "that changes it"
        )


def _identity(parameter: Tensor) -> tuple[int, int]:
    """Its version, and where its values are: ``parameter.data = ...`` puts them elsewhere."""
    try:
        return version_of(parameter), parameter.data_ptr()
    except (RuntimeError, ValueError, NotImplementedError):
        # Sparse and lazy ones are nowhere.
        return version_of(parameter), 0


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, -1 if nobody counts that."""
    if is_lazy(tensor) or tensor.is_inference():
        return -1
    return tensor._version


def _set_flags(flags: list[tuple[nn.Module, bool]]) -> None:
    for module, training in flags:
        # Setting an attribute of a module is slow.
        if module.training != training:
            module.training = training


def _forward_hooks(module: nn.Module) -> list[dict[int, Any]]:
    return [
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    ]


def _set_hooks(tables: list[tuple[dict[int, Any], dict[int, Any]]]) -> None:
    for table, hooks in tables:
        if table != hooks:
            table.clear()
            table.update(hooks)


def _set_requires_grad(parameters: list[tuple[Tensor, bool]]) -> None:
    for parameter, requires_grad in parameters:
        if parameter.requires_grad != requires_grad:
            parameter.requires_grad_(requires_grad)


def _set_tensors(tensors: list[tuple[dict[str, Any], str, Any]]) -> None:
    for table, name, tensor in tensors:
        if tensor is not _MISSING:
            table[name] = tensor
        else:
            table.pop(name, None)
