"""Mapped modules that are called: the wrapper has the call, or the module brings its arguments.

::

    within a step             the course of the thread computes the module
    within another module     the module's own call, since the module that is mapped runs as a whole
    outside of a step         the module brings its arguments, as when the model generates text
    without a wrapper         the same, as in a deep copy for an average of the weights, or after
                              ``unwrap()`` has left the model on its devices
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe._torch.dynamo import Interception, is_compiled, uncompiled
from torchgpipe.ambient.notes import noted
from torchgpipe.devices.streams import current_stream, record_stream
from torchgpipe.mapped.body import INSIDE, current
from torchgpipe.mapped.containers import handing_back, map_arguments, tensors_of
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.foreign import may_meet, watched
from torchgpipe.mapped.step import Lasting
from torchgpipe.partition.placement import Lent, elsewhere, places_of

__all__: list[str] = []


class CallAlone(Interception):
    """A call of a mapped module that has no wrapper, in place of the module's own.

    It copies the arguments to the module's device, as Accelerate's hooks do.
    """

    def __init__(self, mapped: Mapped, inner: Callable[..., Any] | None, lasting: Lasting) -> None:
        self.mapped = mapped
        self.inner = inner
        self.compiled = inner is not None
        self._lasting = lasting

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, mapped = self.mapped.module, self.mapped
        # Not in __init__(): a deep copy of the module gets this object first, then its weights.
        (mapped.lent,) = places_of([(module, self.device_of(mapped, ()))])
        return self.outside(mapped, self.inner or module._call_impl, args, kwargs)

    def device_of(self, mapped: Mapped, tensors: Sequence[Tensor]) -> torch.device:
        """The device of a module: that of the map, unless somebody has moved the module.

        Without parameters and buffers it is where the arguments are.
        """
        devices = devices_of(mapped.module) or {x.device for x in tensors}
        return mapped.device if mapped.device in devices or len(devices) != 1 else devices.pop()

    def outside(
        self,
        mapped: Mapped,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Compute the module with its arguments copied to its device."""
        arguments, tensors = (args, kwargs), tensors_of((args, kwargs))
        copies, near = list[Any](), partial(_near, self.device_of(mapped, tensors))
        # Each tensor gets one copy: the module may change it, or compare arguments by identity.
        here = near(tensors)
        args, kwargs = map_arguments(lambda x: here[id(x)], arguments, copies)
        if mapped.lent:
            # guard: weights that checkpoints of the model need again
            lent = Lent(mapped.lent, lambda xs: [*near(xs).values()], self._lasting.lock)
            inner = partial(lent.call, inner)
        if may_meet(self._lasting.met, mapped):
            inner = watched(self._lasting.met, mapped, near, inner)
        handing = handing_back(arguments, (args, kwargs)) if copies else nullcontext()
        with noted(f"raised in {mapped.words}"), handing:
            return inner(*args, **kwargs)

    def unwrapped(self, module: nn.Module, inner: Callable[..., Any] | None = None) -> CallAlone:
        """A call of the module, or of a copy of it, that has no wrapper."""
        mapped = self.mapped
        copy = Mapped(mapped.name, mapped.key, module, mapped.device, mapped.words)
        return CallAlone(copy, inner, self._lasting)

    def __deepcopy__(self, memo: dict[int, Any]) -> CallAlone | None:
        module: Any = memo.get(id(self.mapped.module))
        is_spread = ON_COPY in vars(self.mapped.module)
        return self.unwrapped(module) if is_spread and module is not None else None


#: The name of the attribute in which a mapped module holds its :class:`OnCopy`, by which a deep
#: copy of the module gets a :class:`CallAlone`. Only modules of a model on several devices have it.
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
        # In a checkpoint of PyTorch, a tensor's memory may belong to a copy stream or the stream of
        # a later visit, which could use the memory again too early.
        # guard: recording for a checkpoint of PyTorch
        record_stream(x, current_stream(x.device))
    return {id(x): x.to(device) for x in tensors}


# Interception: a call of a mapped module goes to its wrapper.
#
# If a module's attribute ``_compiled_call_impl`` is set, PyTorch calls the module through it, as
# after ``module.compile()``. The wrapper sets it to a :class:`Call`, within which the module's own
# hooks and compiled code run. Copies and pickles of the module leave the attribute out, and neither
# its class nor its state dict changes. Other ways fail: forward hooks would run within the compiled
# code, and a replaced ``forward``, as Accelerate sets it, within the module's own hooks.


class Call(CallAlone):
    """A call of a mapped module that goes to a wrapper, in place of the module's own."""

    def __init__(self, mapped: Mapped, inner: Callable[..., Any] | None, lasting: Lasting) -> None:
        super().__init__(mapped, inner, lasting)
        #: The devices of the module's tensors at first, and its devices by the map; empty without
        #: tensors. If tensors are on none of these, ``device_of()`` takes the module for moved.
        self._homes = devices_of(mapped.module)
        if self._homes:
            self._homes |= {x.device for x in (mapped, *mapped.names)}

    def device_of(self, mapped: Mapped, tensors: Sequence[Tensor]) -> torch.device:
        # Also in backward, when a checkpoint of PyTorch's calls the module again, it runs where the
        # map says, though a weight that it shares is on another device. Only a module that the user
        # has moved away from all its devices runs where its tensors are.
        is_moved = self._homes and self._homes.isdisjoint(devices_of(mapped.module))
        return super().device_of(mapped, tensors) if is_moved else mapped.device

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        course, module = current.course, self.mapped.module
        # Looked up in each call: a bound method that is stored would be a reference cycle.
        inner = self.inner or module._call_impl
        if course is INSIDE:
            return inner(*args, **kwargs)
        if course is None:
            # Backward is an exception: a checkpoint of PyTorch calls modules in autograd's threads.
            if self._lasting.thread is not None and _torch.graph_task() == -1:
                raise RuntimeError(
                    "within a step, the modules of a device map must be called in the thread that "
                    f"called the wrapper (module: {self.mapped.name}); have the model's forward "
                    "call them itself, or call the model outside of a step"
                )
            mapped = self.mapped.called(current.counts)
            return self.outside(mapped, inner, args, kwargs)
        return course.call(self.mapped, module, inner, (args, kwargs))


def intercept(mapped: Mapped, lasting: Lasting, *, is_spread: bool) -> Call:
    """Make calls of a module go to its wrapper."""
    module: nn.Module = mapped.module
    inner: Any = module._compiled_call_impl
    if isinstance(inner, CallAlone):
        # ``inner`` is another wrapper's call: the new call replaces it, and runs what that one ran.
        inner = inner.inner
    call = Call(mapped, inner, lasting)
    lasting.has_names |= bool(mapped.names)
    put_call(module, call, is_spread=is_spread)
    return call


def is_intercepted(call: Call) -> bool:
    """Whether calls of the module still go to its wrapper, even if it was compiled since."""
    module: nn.Module = call.mapped.module
    installed: Any = module._compiled_call_impl
    if installed is not None and not isinstance(installed, CallAlone):
        call.inner, call.compiled = installed, True
        module._compiled_call_impl = call
    return module._compiled_call_impl is call


def let_go(call: Call, *, is_spread: bool = False) -> None:
    """Make calls of a module go to the module itself again."""
    if is_intercepted(call):
        module = call.mapped.module
        put_call(module, call.unwrapped(module, call.inner), is_spread=is_spread)
        if not is_spread:
            module._compiled_call_impl = call.inner


def verify_calls(
    model: nn.Module,
    calls: Sequence[Call],
    around: Sequence[tuple[str, nn.Module]],
    devices: Collection[torch.device],
) -> None:
    """Check that calls of the mapped modules go to their wrapper, and that these are in place.

    Raises:
        RuntimeError: they do not, or code around them is compiled, or tensors were moved.
    """
    if not calls:
        raise RuntimeError(
            "a wrapper cannot be called after unwrap(), which has given its model back (model: "
            f"{type(model).__name__}); call the model, or wrap it anew"
        )
    lost = [call.mapped.name for call in calls if not is_intercepted(call)]
    if lost:
        raise RuntimeError(
            "the modules of a device map must be called through their wrapper (modules: "
            f"{lost[:5]}); use the latest of several wrappers only"
        )
    for name, module in around:
        if is_compiled(module):
            raise RuntimeError(
                "only whole modules of a device map can be compiled, since compiled code around "
                f"them calls them in its own way (compiled: {name or 'the model'}); compile the "
                "modules that the map names"
            )
    for call in calls:
        lent = call.mapped.lent or ()
        if moved := elsewhere(call.mapped.module, call.mapped.device, lent, devices):
            raise RuntimeError(
                "parameters and buffers must stay on the device of their module "
                f"({call.mapped.name}: {moved}); move the tensor back, or wrap the model anew with "
                "another map"
            )


class Signed:
    """A method of a wrapper, with the signature that :func:`signed` has made for the object.

    Trainers drop the columns of a data set that the signature of ``model.forward`` does not name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @uncompiled
    def __get__(self, wrapper: nn.Module | None, owner: type) -> Callable[..., Any]:
        if wrapper is None:
            return self.function
        # Bound anew each time: a wrapper that keeps its bound method would be a reference cycle.
        return MethodType(wrapper.__dict__.get("_signed", self.function), wrapper)


def signed(method: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a method, with the signature of a model's forward.

    It has the code object of the method, by which torch.compile knows what not to compile.
    """
    copy: Any = FunctionType(method.__code__, method.__globals__, method.__name__)
    first, *_ = inspect.signature(method).parameters.values()
    signature = inspect.signature(model)
    copy.__doc__ = method.__doc__
    # Among these attributes are those by which uncompiled() keeps torch.compile away.
    copy.__dict__.update(method.__dict__)
    copy.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])
    function: Callable[..., Any] = copy
    return function
