"""Mapped modules that are called: the wrapper has the call, and computes the module as a whole."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe._torch.checkpoints import repeating
from torchgpipe._torch.dynamo import is_compiled, uncompiled
from torchgpipe.ambient.context import Swap, registered
from torchgpipe.ambient.notes import layer
from torchgpipe.engine.body import Body
from torchgpipe.mapped.alone import CallAlone, devices_of, put_call
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.partition.placement import elsewhere
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.structure import Structure

if TYPE_CHECKING:
    from torchgpipe.mapped.step import Lasting

__all__: list[str] = []


# Interception: a call of a mapped module goes to its wrapper.
#
# ``module.compile()`` sets an attribute through which PyTorch calls the module then. The wrapper
# sets the same one. So the module's own hooks and compiled code run within the intercepted call.
# Copies and pickles of the module leave the attribute out, and neither its class nor its state
# dict changes. Other ways fail: forward hooks would run within the compiled code, and another
# ``forward``, as Accelerate sets it, would run within the module's own hooks.


class Call(CallAlone):
    """A call of a mapped module that goes to a wrapper, in place of the module's own."""

    def __init__(self, mapped: Mapped, inner: Callable[..., Any] | None, lasting: Lasting) -> None:
        super().__init__(mapped, inner, lasting)
        #: The devices on which its tensors are at home, or copies of them while they are lent.
        self._homes = devices_of(mapped.module)
        if self._homes:
            self._homes |= {x.device for x in (mapped, *mapped.turns)}

    def place(self, mapped: Mapped, tensors: Sequence[Tensor]) -> torch.device:
        # A checkpoint of PyTorch computes a module again where a step has computed it.
        is_moved = self._homes and self._homes.isdisjoint(devices_of(mapped.module))
        return super().place(mapped, tensors) if is_moved else mapped.device

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        course, module = current.course, self.mapped.module
        # Looked up by each call: to store the bound method would make a reference cycle.
        inner = self.inner or module._call_impl
        if course is INSIDE:
            return inner(*args, **kwargs)
        if course is None:
            # A checkpoint of PyTorch computes the module again in a thread of autograd.
            if self._lasting.thread is not None and _torch.graph_task() == -1:
                raise RuntimeError(
                    "within a step, the modules of a device map must be called in the thread that "
                    f"called the wrapper (module: {self.mapped.name}); have the model's forward "
                    "call them itself, or call the model outside of a step"
                )
            # Outside of a step, as when the model generates text.
            mapped = self.mapped.turn(current.counts)
            return self.outside(mapped, inner, args, kwargs)
        return course.call(self.mapped, module, inner, (args, kwargs))


def intercept(mapped: Mapped, lasting: Lasting, *, is_spread: bool) -> Call:
    """Make calls of a module go to its wrapper."""
    module: nn.Module = mapped.module
    inner: Any = module._compiled_call_impl
    if isinstance(inner, CallAlone):
        # Of another wrapper around the same module.
        inner = inner.inner
    found = Call(mapped, inner, lasting)
    lasting.in_turns |= bool(mapped.turns)
    put_call(module, found, is_spread=is_spread)
    return found


def is_intercepted(call: Call) -> bool:
    """Whether calls of the module still go to its wrapper, even if it was compiled since."""
    module: nn.Module = call.mapped.module
    found: Any = module._compiled_call_impl
    if found is not None and not isinstance(found, CallAlone):
        call.inner, call.compiled = found, True
        module._compiled_call_impl = call
    return module._compiled_call_impl is call


def let_go(call: Call, *, is_spread: bool = False) -> None:
    """Make calls of a module go to the module itself again."""
    if is_intercepted(call):
        module = call.mapped.module
        put_call(module, call.alone(module, call.inner), is_spread=is_spread)
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
        if found := elsewhere(call.mapped.module, call.mapped.device, lent, devices):
            raise RuntimeError(
                "parameters and buffers must stay on the device of their module "
                f"({call.mapped.name}: {found}); move the tensor back, or wrap the model anew with "
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
        # Not kept as a bound method, which would refer to the object that it is kept in.
        return MethodType(wrapper.__dict__.get("_signed", self.function), wrapper)


def signed(method: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of a method, with the signature of a model's forward.

    It has the code object of the method, by which torch.compile knows what not to compile.
    """
    found: Any = FunctionType(method.__code__, method.__globals__, method.__name__)
    own = [*inspect.signature(method).parameters.values()]
    given = inspect.signature(model)
    found.__doc__ = method.__doc__
    # These include the marks that torch.compile reads.
    found.__dict__.update(method.__dict__)
    found.__signature__ = given.replace(parameters=[own[0], *given.parameters.values()])
    function: Callable[..., Any] = found
    return function


# The body of a cell: a mapped module, which is computed as a whole, once or twice.


#: Stands for a course while a mapped module is computed.
INSIDE: Any = object()


class Current(threading.local):
    """The course that a thread runs, or :data:`INSIDE`; None outside of a step."""

    course: Any = None
    #: How often each module with names on several devices was called.
    counts: Counter[Mapped] | None = None


current = registered(Current())


def in_turns(counts: Counter[Mapped], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function in which modules take turns, as checkpoints of PyTorch do in backward."""
    own = Counter(counts)
    with Swap(current, counts=own), repeating(lambda: partial(in_turns, Counter(own))):
        return inner(*args, **kwargs)


class inside:
    """Compute a mapped module as a whole, whatever it calls, within a ``with`` block.

    Args:
        glue: the mode for code between modules, which is off in the block if it is the innermost
            one. Within a module all tensors are on one device, and a mode takes a microsecond for
            each operator.
    """

    __slots__ = ("_glue", "_outer", "_popped")

    def __init__(self, glue: TorchFunctionMode | None = None) -> None:
        self._glue = glue

    def __enter__(self) -> None:
        self._outer, current.course = current.course, INSIDE
        count = 0 if self._glue is None else _torch.count_function_modes()
        self._popped = count and _torch.function_mode_at(count - 1) is self._glue
        if self._popped:
            _torch.pop_function_mode()

    def __exit__(self, *_: object) -> None:
        current.course = self._outer
        if self._popped:
            _torch.push_function_mode(self._glue)


class MappedBody(Body):
    """A mapped module in one stage of one step.

    Each stage has a body of its own, since the state of the module is that of its first call there.

    Args:
        module: the module.
        inner: the module's own call. Its class may have a ``__call__``, which has been called.
        lock: a lock to hold while the module runs for the second time.
        state: the state of the module; None in a step without recomputation.
        name: its name in the model.
    """

    __slots__ = (
        *("buffered", "changes_input", "checkpointed", "foreign", "name", "omits", "shared"),
    )

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        lock: AbstractContextManager[Any],
        state: LayersState | None,
        name: str = "",
    ) -> None:
        super().__init__(module, lock, state, False)
        self.call, self.name = inner, name
        # The model may use an input that the module changes in place, so none is cloned in forward.
        self.changes_input, self.in_place = self.in_place, False
        #: How many micro-batches, from the first, are computed under checkpointing.
        self.checkpointed = 0
        #: Whether outputs may be computed when somebody looks at them. Mode "except_last" keeps all
        #: of a micro-batch, and policies serve one recomputation.
        self.omits = False
        #: Whether the module may meet tensors of other devices.
        self.foreign = False
        #: Whether another visit of the device calls the module, too.
        self.shared = False
        #: Its layers that have buffers.
        self.buffered: Sequence[nn.Module] | None = None

    def run_alone(self, arguments: tuple[Any, Any]) -> Any:
        """Run the module with its arguments as they are, where there is no recomputation."""
        args, kwargs = arguments
        return self.call(*args, **kwargs)

    def run_twice(self, batch: Batch, own: list[Any], **more: Any) -> Batch:
        """Run the module under checkpointing, in forward or in recomputation.

        Args:
            batch: its arguments.
            own: a list with the arguments as the module is called with them. The first run may
                change lists and dicts among them. A recomputation has lists and dicts of its own.
            **more: for :meth:`run`.
        """
        # As a layer of a partition, for errors about what it saves and changes.
        layer.name, layer.kind = self.name, type(self.layers).__name__
        with inside():
            if not is_recomputing():
                # The checkpoint holds the list until backward.
                args, kwargs = own.pop()
                return self.run(batch, call=lambda *_, **__: self.call(*args, **kwargs), **more)
            try:
                # The inputs of recomputation are leaves, which cannot be changed in place.
                return self.run(self.kept(batch), **more)
            finally:
                # The note on an error names the module as its place.
                layer.name = None

    def kept(self, batch: Batch) -> Batch:
        """Keep the arguments for a later run: as clones, if this run may change them in place."""
        others = batch.others
        if any(isinstance(x, list | dict) for x in others.values()):
            # Lists and dicts of a subclass, which PyTorch does not know as containers.
            others = {k: copy(x) if isinstance(x, list | dict) else x for k, x in others.items()}
            batch = batch.copy()
            batch.structures = {VALUE: Structure(batch.structures[VALUE].spec, others)}
        if not self.changes_input:
            return batch
        return batch.map(lambda *xs: [x.clone() for x in xs], [VALUE])
