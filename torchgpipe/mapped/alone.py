"""A model on several devices without its wrapper: each module brings its own arguments.

So a model computes while it generates text, and where it has no wrapper: as a deep copy, for an
average of the weights, or after ``unwrap()`` has left it on its devices. The hooks of Accelerate do
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import Interception, uncompiled
from torchgpipe.ambient.notes import noted
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.mapped.containers import handing_back, map_arguments, tensors_of
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.foreign import may_meet, watched
from torchgpipe.partition.placement import Lent, places_of

if TYPE_CHECKING:
    from torchgpipe.mapped.step import Lasting

__all__: list[str] = []


class CallAlone(Interception):
    """A call of a mapped module that has no wrapper, in place of the module's own."""

    def __init__(self, mapped: Mapped, inner: Callable[..., Any] | None, lasting: Lasting) -> None:
        self.mapped = mapped
        self.inner = inner
        self.compiled = inner is not None
        self._lasting = lasting

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, mapped = self.mapped.module, self.mapped
        # A copy has no weights yet when its call is made.
        (mapped.lent,) = places_of([(module, self.place(mapped, ()))])
        return self.outside(mapped, self.inner or module._call_impl, args, kwargs)

    def place(self, mapped: Mapped, tensors: Sequence[Tensor]) -> torch.device:
        """The device of a module: that of the map, unless somebody has moved the module.

        Without parameters and buffers it is where the arguments are.
        """
        own = devices_of(mapped.module) or {x.device for x in tensors}
        return mapped.device if mapped.device in own or len(own) != 1 else own.pop()

    def outside(
        self,
        mapped: Mapped,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute the module, whose arguments come to its device."""
        given, tensors = (args, kwargs), tensors_of((args, kwargs))
        copies, near = list[Any](), partial(_near, self.place(mapped, tensors))
        # One copy of each: the module may change it in place, or ask whether two are the same.
        here = near(tensors)
        args, kwargs = map_arguments(lambda x: here[id(x)], given, copies)
        if mapped.lent:
            # guard: weights that checkpoints of the model need again
            lent = Lent(mapped.lent, lambda xs: [*near(xs).values()], self._lasting.lock)
            inner = partial(lent.call, inner)
        if may_meet(self._lasting.met, mapped):
            inner = watched(self._lasting.met, mapped, near, inner)
        handing = handing_back(given, (args, kwargs)) if copies else nullcontext()
        with noted(f"raised in {mapped.place}"), handing:
            return inner(*args, **kwargs)

    def alone(self, module: nn.Module, inner: Callable[..., Any] | None = None) -> CallAlone:
        """A call of the module, or of a copy of it, that has no wrapper."""
        mapped = self.mapped
        own = Mapped(mapped.name, mapped.key, module, mapped.device, mapped.place)
        return CallAlone(own, inner, self._lasting)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallAlone | None:
        module: Any = memo.get(id(self.mapped.module))
        is_spread = ON_COPY in vars(self.mapped.module)
        return self.alone(module) if is_spread and module is not None else None


#: The attribute of a mapped module, on several devices, that gives a deep copy a call of its own.
ON_COPY = "_torchgpipe_on_copy"


class OnCopy:
    """An object that copies the call of a module with the module, as PyTorch does not.

    It has no ``__dict__``, so that nobody takes it for a container with values of the model's.
    """

    __slots__ = ("_call",)

    def __init__(self, call: CallAlone) -> None:
        self._call = call

    def __deepcopy__(self, memo: dict[int, Any]) -> OnCopy | None:
        call = deepcopy(self._call, memo)
        if call is None:
            return None
        call.mapped.module.__dict__["_compiled_call_impl"] = call
        return OnCopy(call)

    def __reduce__(self) -> Any:
        """None: a pickle belongs to no devices."""
        return type(None), ()


def put_call(module: nn.Module, call: CallAlone, *, is_spread: bool) -> None:
    """Put a call in place of a module's own, and in place of a copy's if the model is spread."""
    module._compiled_call_impl = call
    vars(module).pop(ON_COPY, None)
    if is_spread:
        vars(module)[ON_COPY] = OnCopy(call)


def devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of a module's parameters and buffers."""
    return {x.device for x in (*module.parameters(), *module.buffers())}


def _near(device: torch.device, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    for x in tensors:
        # A checkpoint of PyTorch has what came on a lane, or is of a later visit.
        # guard: recording for a checkpoint of PyTorch
        record_stream(x, current_stream(x.device))
    return {id(x): x.to(device) for x in tensors}
