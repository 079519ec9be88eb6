"""Mapped modules that are called: the wrapper has the call, and computes the module as a whole."""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe._torch.checkpoints import repeating
from torchgpipe._torch.dynamo import Interception, uncompiled
from torchgpipe.ambient.context import registered
from torchgpipe.ambient.notes import Visit, noted
from torchgpipe.devices.streams import current_stream, has_streams, record_stream
from torchgpipe.engine.body import Body
from torchgpipe.mapped.containers import handing_back, map_arguments, tensors_of
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.exchanged import Attributes, CallAttributes, RestoredAttributes
from torchgpipe.mapped.foreign import may_meet, watched
from torchgpipe.partition.placement import Lent
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


class Call(Interception):
    """A call of a mapped module, in place of the module's own.

    Args:
        mapped: the module.
        inner: the module's own call, if another one than PyTorch's.
        lasting: tells which thread runs a step.
    """

    def __init__(self, mapped: Mapped, inner: Callable[..., Any] | None, lasting: Lasting) -> None:
        self.mapped = mapped
        self.inner = inner
        self.compiled = inner is not None
        self._lasting = lasting

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
            given, copies, near = (args, kwargs), list[Any](), partial(_near, mapped.device)
            # One copy of each: the module may change it in place, or ask whether two are the same.
            here = near(tensors_of(given))
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
        return course.call(self.mapped, module, inner, (args, kwargs))


def _near(device: torch.device, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
    for x in tensors:
        # A checkpoint of PyTorch has what came on a lane, or is of a later visit.
        # guard: recording for a checkpoint of PyTorch
        record_stream(x, current_stream(x.device))
    return {id(x): x.to(device) for x in tensors}


class Near:
    """Copy tensors that the caller has on the CPU to a device, each once.

    Later, each such copy would make the host wait for all work that the device has by then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}

    def all_of(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors, on the device if they are on the CPU, and the device is an accelerator."""
        if not has_streams(self._device):
            return [*tensors]
        for x in tensors:
            if x.device.type == "cpu" and id(x) not in self._moved:
                self._moved[id(x)] = x, x.to(self._device)
        return [self._moved[id(x)][1] if id(x) in self._moved else x for x in tensors]


def intercept(mapped: Mapped, lasting: Lasting) -> Call:
    """Make calls of a module go to its wrapper."""
    module: nn.Module = mapped.module
    inner: Any = module._compiled_call_impl
    if isinstance(inner, Call):
        # Of another wrapper around the same module.
        inner = inner.inner
    found = Call(mapped, inner, lasting)
    lasting.in_turns |= bool(mapped.turns)
    module._compiled_call_impl = found
    return found


def is_intercepted(call: Call) -> bool:
    """Whether calls of the module still go to its wrapper, even if it was compiled since."""
    module: nn.Module = call.mapped.module
    found: Any = module._compiled_call_impl
    if found is not None and not isinstance(found, Call):
        call.inner, call.compiled = found, True
        module._compiled_call_impl = call
    return module._compiled_call_impl is call


def let_go(call: Call) -> None:
    """Make calls of a module go to the module itself again."""
    if call.mapped.module._compiled_call_impl is call:
        call.mapped.module._compiled_call_impl = call.inner


class Signed:
    """A method of a wrapper, with the signature that :func:`signed` has made for the object.

    Trainers drop the columns of a data set that the signature of ``model.forward`` does not name.

    Args:
        function: the method.
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
    outer, current.counts = current.counts, (own := Counter(counts))
    try:
        with repeating(lambda: partial(in_turns, Counter(own))):
            return inner(*args, **kwargs)
    finally:
        current.counts = outer


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
        attributes: its attributes; None in a step without recomputation.
    """

    __slots__ = (
        *("attributes", "changes_input", "checkpointed", "foreign", "omits", "shared"),
        "buffered",
    )

    def __init__(
        self,
        module: nn.Module,
        inner: Callable[..., Any],
        lock: AbstractContextManager[Any],
        state: LayersState | None,
        attributes: Attributes | None,
    ) -> None:
        super().__init__(module, lock, state, False)
        self.call = inner
        self.attributes = attributes
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

    def run_alone(self, arguments: tuple[Any, Any], note: str = "") -> Any:
        """Run the module with its arguments as they are, where there is no recomputation.

        Args:
            arguments: the positional arguments, and the keyword arguments.
            note: as in :meth:`run`.
        """
        args, kwargs = arguments
        if not note:
            return self.call(*args, **kwargs)
        visit = Visit(self.layers, tensors_of(arguments), tuple, note)
        with visit:
            output = self.call(*args, **kwargs)
            visit.visit(*tensors_of(output))
        return output

    def run_twice(
        self, batch: Batch, given: CallAttributes | None, own: list[Any], **more: Any
    ) -> Batch:
        """Run the module under checkpointing, in forward or in recomputation.

        Args:
            batch: its arguments.
            given: the attributes that the first run has found.
            own: a list with the arguments as the module is called with them. The first run may
                change lists and dicts among them. A recomputation has lists and dicts of its own.
            **more: for :meth:`run`.
        """
        with inside():
            if not is_recomputing():
                # The checkpoint holds the list until backward.
                args, kwargs = own.pop()
                return self.run(batch, call=lambda *_, **__: self.call(*args, **kwargs), **more)
            # The inputs of recomputation are leaves, which cannot be changed in place.
            batch = self.kept(batch)
            # Most models set no attributes.
            if given is None or not (given.keys or given.deep):
                return self.run(batch, **more)
            # Modules on several devices may share objects in their attributes.
            # guard: contents of several devices
            with self.lock, RestoredAttributes(given):
                return self.run(batch, **more)

    def kept(self, batch: Batch) -> Batch:
        """Keep the arguments for a later run: as clones, if this run may change them in place."""
        others = batch.others
        if any(isinstance(x, list | dict) for x in others.values()):
            # Of a class that PyTorch does not know as a container.
            others = {k: copy(x) if isinstance(x, list | dict) else x for k, x in others.items()}
            batch = batch.copy()
            batch.structures = {VALUE: Structure(batch.structures[VALUE].spec, others)}
        if not self.changes_input:
            return batch
        return batch.map(lambda *xs: [x.clone() for x in xs], [VALUE])
