"""Foreign tensors: those of other devices that a mapped module meets, and is not called with.

A network of adapters outside of the model, for one, scales all of them by one tensor. PyTorch takes
a 0-dimensional tensor of the CPU on any device. Here a module takes a tensor of one element from
any accelerator: it comes on lanes, as an argument does. Others are an error.

A mode sees each function that the module calls, which takes a microsecond. So it watches modules in
their first step, with gradients and without, and after that only those that have met such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.ambient.context import is_in_checkpoint
from torchgpipe.ambient.notes import is_about_devices
from torchgpipe.devices.streams import has_streams
from torchgpipe.mapped.containers import replaced, tensors_of, within
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.functions import APART, TARGETS, changed_argument

__all__: list[str] = []

#: Whether the module of a name has used foreign tensors, without gradients (False) and with (True).
Met: TypeAlias = dict[tuple[str, bool], bool]

#: A function that copies tensors to a module's device, and gives the copies by the originals' id().
Bring: TypeAlias = Callable[[Sequence[Tensor]], Mapping[int, Tensor]]


class Foreign(TorchFunctionMode):
    """Bring foreign tensors of one element to a module."""

    def __init__(self, device: torch.device, copies: list[Tensor], bring: Bring | None) -> None:
        super().__init__()
        self._device, self._copies, self._bring = device, copies, bring
        self._again = iter(copies)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of((args, kwargs))
        name = getattr(func, "__name__", "")
        if (
            len({x.device for x in tensors}) > 1
            and not (func in TARGETS or name in APART)
            # A checkpoint of PyTorch's own repeats its code in backward, where this mode is not on:
            # copies made here would be missing there. So such tensors raise PyTorch's error.
            and not is_in_checkpoint()
        ):
            changed = {id(x) for x in tensors_of(changed_argument(name, args, kwargs))}
            others = {
                id(x): self._copy(x)
                for x in dict(zip(map(id, tensors), tensors)).values()
                # PyTorch takes 0-dimensional tensors of the CPU on any device, so these stay.
                if x.device != self._device and (x.dim() or has_streams(x.device))
                if x.numel() == 1 and id(x) not in changed
            }
            args, kwargs = replaced((args, dict(kwargs)), others)
        return func(*args, **kwargs)

    def _copy(self, tensor: Tensor) -> Tensor:
        if self._bring is None:
            return next(self._again, tensor)
        copy = self._bring([tensor])[id(tensor)]
        self._copies.append(copy)
        return copy


def may_meet(met: Met, mapped: Mapped) -> bool:
    """Whether a module may meet foreign tensors, as far as its calls have shown."""
    # Compiled code is not watched: PyTorch would compile it anew for a torch-function mode.
    known = met.get((mapped.name, torch.is_grad_enabled()), True)
    return known and not any(map(is_compiled, mapped.module.modules()))


def watched(met: Met, mapped: Mapped, bring: Bring, run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that computes a module bring foreign tensors, and note if it meets any."""
    key = mapped.name, torch.is_grad_enabled()
    # The first call takes ``bring`` out of ``first``. A checkpoint keeps call() until backward, and
    # must not keep the step, to which ``bring`` refers.
    first, copies = [bring], list[Tensor]()

    def call(*args: Any, **kwargs: Any) -> Any:
        with Foreign(mapped.device, copies, first.pop() if first else None):
            output = run(*args, **kwargs)
        met[key] = met.get(key, False) or bool(copies)
        return output

    return call


def explain(error: RuntimeError, mapped: Mapped, met: Met) -> None:
    """Explain an error about devices, if the module holds tensors of other devices.

    Raises:
        RuntimeError: it does.
    """
    if not is_about_devices(error):
        return
    # The module may use a tensor that it did not use while it was watched: watch the next step.
    met[mapped.name, torch.is_grad_enabled()] = True
    if attributes := elsewhere_in(mapped.module, mapped.device):
        raise RuntimeError(
            "modules of a device map must not hand tensors to modules on other devices through "
            f"lists, dicts or objects that they hold (module: {mapped.words}, found: "
            f"{', '.join(attributes[:5])}); call the modules with the object, whose tensors come "
            "along then, or map them to one device"
        ) from error


def elsewhere_in(module: nn.Module, device: torch.device) -> list[str]:
    """The attributes of a module, and of those within, that have tensors of other devices."""
    attributes = []
    for name, inner in module.named_modules():
        for key, value in vars(inner).items():
            # Parameters and buffers are left out: verify_calls() checks them before each step.
            if key not in ("_parameters", "_buffers", "_modules"):
                devices = [x.device for x in (value, *within(value)) if isinstance(x, Tensor)]
                if other := next((x for x in devices if x != device), None):
                    attributes.append(f"{name}.{key}".lstrip(".") + f" on {other}")
    return attributes
