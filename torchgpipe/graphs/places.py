"""Places: where modules hold their tensors, and all other state that their forward depends on.

A graph is traced with fake tensors in these places, and is valid for the state that the layers had
then. So before each step, that state is compared with the present one, if possible by identity. A
trace refuses to read tensors of other places.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe._torch.attributes import has_global_hooks
from torchgpipe.ambient.context import leave_checkpoints
from torchgpipe.graphs.globals import Sources, Variables
from torchgpipe.graphs.snapshot import Elements, Slots, Snapshot, attributes_of
from torchgpipe.values.structure import ATOMS, MISSING, equal, leaves_of

__all__: list[str] = []

#: A container, and the key of a tensor in it.
Place: TypeAlias = tuple[Any, Any]

#: The attributes that every module has.
OWN = {*nn.Module().__dict__}


class UntraceableError(Exception):
    """A stage cannot be a graph. The message says why, as the end of a sentence."""


class Places:
    """The tensors of some modules: parameters, buffers, and tensors in attributes.

    Args:
        modules: the modules, with all that is in them.
        others: further objects that decide what is computed, as a loss function.
    """

    def __init__(self, modules: Iterable[nn.Module], others: Iterable[Any] = ()) -> None:
        self._modules = [*dict.fromkeys(x for some in modules for x in some.modules())]
        self._found: list[Place] = []
        for module in self._modules:
            own = module.__dict__
            self._found += [(own, key) for key, x in own.items() if isinstance(x, Tensor)]
            for some in own.values():
                if type(some) is list:
                    # Recurrent layers have a list of their weights.
                    self._found += [(some, k) for k, x in enumerate(some) if isinstance(x, Tensor)]
                elif isinstance(some, dict):
                    self._found += [(some, key) for key, x in some.items() if isinstance(x, Tensor)]
        #: The attributes and the submodules of each module, and copies to compare them with.
        self._tables = [table for x in self._modules for table in (x.__dict__, x._modules)]
        self._before: list[dict[str, Any]] = [*map(dict, self._tables)]
        #: Objects in attributes, which may change without the attribute.
        self._held = [x for module in self._modules for x in _objects(module)]
        self._held += [("the loss", x) for x in others]
        self._known = frozenset(map(id, self._modules))
        self._sources = Sources(self._held, map(type, self._modules), self._known)
        self._objects = self._snapshot()
        self._now = self._look()

    def read(self) -> list[Tensor]:
        """The tensors that are in the places now, each once."""
        return [*{id(x): x for x in (table[key] for table, key in self._found)}.values()]

    def put(self, tensors: Sequence[Tensor]) -> Substitution:
        """Put other tensors in the places, in the order of :meth:`read`, in a ``with`` block."""
        return Substitution(self._found, dict(zip(map(id, self.read()), tensors)))

    @property
    def fault(self) -> str:
        """The reason why changes of an object cannot be seen; empty if they can."""
        return self._objects.fault

    def restored(self) -> Restored:
        """Restore all attributes after a ``with`` block, and see which of them have changed."""
        names = [type(x).__name__ for x in self._modules for _ in range(2)]
        variables = [(x.owner, x) for x in self._sources.tables.values()]
        return Restored([*zip(names, self._tables), *variables], self._snapshot)

    def are_current(self) -> bool:
        """Whether the modules have the same attributes, and tensors of the same kind, as before."""
        try:
            # Dicts compare what they hold by identity first.
            return (
                self._tables == self._before
                and self._look() == self._now
                and self._sources.are_same()
                and self._snapshot().same(self._objects)
            )
        except Exception:
            # Objects that cannot be compared, as arrays, or that are not there any more.
            return False

    def _look(self) -> Any:
        tensors = [table[key] for table, key in self._found]
        first: dict[int, int] = {}
        # Which places hold the same tensor.
        ties = [first.setdefault(id(x), len(first)) for x in tensors]
        types = [[*map(type, x.values())] for x in self._tables]
        # Zeros are equal, so their signs are compared.
        signs = [
            math.copysign(1, x)
            for table, some in zip(self._tables, types)
            if float in some
            for x in table.values()
            if type(x) is float
        ]
        empty = [
            [(key, value is None) for key, value in table.items()]
            for x in self._modules
            for table in (x._parameters, x._buffers)
            if table
        ]
        return kinds(tensors), ties, types, signs, empty

    def _snapshot(self) -> Snapshot:
        marked = [x for x in self.read() if x.__dict__]
        own = [("a parameter", found) for x in marked if (found := attributes_of(x))]
        return Snapshot([*self._held, *self._sources.values(), *own], self._known)

    def difference(self, other: Places) -> str:
        """The name of an attribute that differs in ``other``, which is of the same modules."""
        for module, now, before in zip(self._modules, self._before[::2], other._before[::2]):
            for key in {**now, **before}:
                if not equal(now.get(key, MISSING), before.get(key, MISSING)):
                    return f"{type(module).__name__}.{key}"
        return ""


def _objects(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """The objects in attributes of a module that are no numbers, texts or tensors."""
    for key, x in module.__dict__.items():
        if key not in OWN and type(x) not in ATOMS and not isinstance(x, Tensor):
            yield f"{type(module).__name__}.{key}", x


class Substitution:
    """Replace the tensors in some places within a ``with`` block.

    Args:
        places: the places.
        others: the other tensors, by the identities of the tensors that they replace.
    """

    def __init__(self, places: Sequence[Place], others: dict[int, Tensor]) -> None:
        self._places = [(table, key, table[key]) for table, key in places]
        self._others = others
        #: The other tensors, with the attributes copied from the tensors that they replace.
        self._attributes: list[tuple[Tensor, dict[str, Any]]] = []
        #: Whether layers have put another tensor into a place within the block.
        self.moved = False
        #: Whether layers have set an attribute of a tensor.
        self.is_marked = False

    def __enter__(self) -> Substitution:
        for table, key, tensor in self._places:
            other = table[key] = self._others[id(tensor)]
            for name, x in attributes_of(tensor).items():
                other.__dict__.setdefault(name, x)
            self._attributes.append((other, dict(other.__dict__)))
        return self

    def __exit__(self, *_: object) -> None:
        for table, key, tensor in self._places:
            self.moved |= _at(table, key) is not self._others[id(tensor)]
            table[key] = tensor
        for other, before in self._attributes:
            # PyTorch itself sets private attributes of fake tensors.
            now = {k: x for k, x in other.__dict__.items() if k in before or k[0] != "_"}
            self.is_marked |= bool(_different(now, before))


class Restored:
    """Restore the contents of containers after a ``with`` block.

    Args:
        tables: attributes of modules, with the names of their owners.
        look: takes a snapshot of all objects in them.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], look: Callable[[], Snapshot]) -> None:
        self._look, self._objects = look, look()
        containers = [*tables, *self._objects.containers]
        self._before = [(name, x, _copied(x)) for name, x in containers]
        #: What has changed, if anything has.
        self.changed: str | None = None

    def __enter__(self) -> Restored:
        return self

    def __exit__(self, *_: object) -> None:
        for name, table, before in self._before:
            keys = _different(_copied(table), before)
            if keys:
                self.changed = f"{name}{keys}"
                # Fake tensors may be in it.
                table.clear()
                (table.extend if isinstance(table, list | deque) else table.update)(before)
        if self.changed is None and not self._look().same(self._objects):
            self.changed = "an object"


def _copied(table: Any) -> Any:
    """Copy the contents of a container into a dict or list."""
    if isinstance(table, Slots | Elements | Variables):
        return table.copy()
    return dict(table) if isinstance(table, dict) else [*table]


def _different(now: Any, before: Any) -> str:
    """A text about the first entry that differs, by identity; empty if there is none."""
    if isinstance(now, dict):
        keys = [x for x in {**before, **now} if now.get(x, MISSING) is not before.get(x, MISSING)]
        return f".{keys[0]}" if keys else ""
    return "" if [*map(id, now)] == [*map(id, before)] else " "


def _at(table: Any, key: Any) -> Any:
    try:
        return table[key]
    except LookupError:
        return None


def kinds(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The properties of tensors that a graph depends on."""
    return tuple(
        [
            (
                x.shape,
                x.stride(),
                x.dtype,
                x.requires_grad,
                x.device,
                x.is_conj(),
                x.is_neg(),
                type(x),
            )
            for x in tensors
        ]
    )


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether hooks run around the forward or the backward of a module."""
    return has_global_hooks() or any(
        x._forward_hooks or x._forward_pre_hooks or x._backward_hooks or x._backward_pre_hooks
        for some in modules
        for x in some.modules()
    )


def verify_plain(tensors: Iterable[Tensor]) -> None:
    """Check that all tensors are ordinary ones.

    Raises:
        UntraceableError: a tensor is of another class, or has no strides.
    """
    for x in tensors:
        if type(x) not in (Tensor, nn.Parameter, nn.Buffer):
            raise UntraceableError(f"it has a tensor of a class of its own ({type(x).__name__})")
        if x.layout != torch.strided or x.is_nested:
            raise UntraceableError("it has a sparse, nested or quantised tensor")


# Tensor values that layers read: each would be a constant of a graph, though it may change.
#
# The tensors of the layers are arguments of a graph, and fake tensors replace them in a trace. So
# a tensor with data must come from elsewhere: from an object, a closure or a global variable. To
# compute with it, to read a number of it or to index by it takes an operator, which is refused.
# Some functions read it without an operator, and are refused, too.


#: Operators that take a tensor of Python's numbers, which is new.
FRESH = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift.default,
)

#: Functions that read memory without an operator, or ask what kind of a tensor it is.
READING = {
    *("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__reduce_ex__", "__deepcopy__", "untyped_storage", "storage", "apply_", "map_"),
    *("tensor", "as_tensor", "asarray"),
    *("__len__", "size", "numel", "nelement", "dim", "ndimension", "stride"),
    *("to", "type_as", "view_as", "expand_as", "reshape_as"),
}
#: Attributes that tell what kind of a tensor it is.
ASKING = [Tensor.shape, Tensor.ndim, Tensor.dtype, Tensor.device, Tensor.requires_grad]

REASON = "it uses a tensor that is not among its parameters, buffers and attributes"


class ReadingNothing(TorchFunctionMode):
    """Refuse reads of tensors with data in a ``with`` block, in which the layers' tensors are fake.

    Args:
        state: the fake tensors of the layers.

    Raises:
        UntraceableError: layers have read such a tensor, the ``.grad`` of a parameter, or a
            generator of their own.
    """

    def __init__(self, state: Sequence[Tensor]) -> None:
        super().__init__()
        self._state = frozenset(map(id, state))
        self._operators = _operators(self)
        self._fault = ""

    def __enter__(self) -> ReadingNothing:
        self._handled = sys.exc_info()[1]
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        leave_checkpoints(error[1], self._handled)
        super().__exit__(*error)
        self._operators.__exit__(*error)
        # Ctrl-C is not replaced by this error.
        if self._fault and (error[0] is None or issubclass(error[0], Exception)):
            # Raised again, since layers may have caught the first one.
            raise UntraceableError(self._fault)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in READING or (name == "__get__" and function.__self__ in ASKING):
            self.verify(args, kwargs)
        elif name == "__get__" and function.__self__ is Tensor.grad and id(args[0]) in self._state:
            self._refuse("its forward reads the gradient of a parameter")
        return function(*args, **(kwargs or {}))

    def verify(self, *arguments: Any) -> None:
        """Check that no tensor with data is among some arguments, nor a generator.

        Raises:
            UntraceableError: one is.
        """
        for x in leaves_of(arguments):
            if isinstance(x, Tensor) and not isinstance(x, _torch.FakeTensor):
                self._refuse(REASON)
            if isinstance(x, torch.Generator):
                self._refuse("it draws from a generator of its own")

    def _refuse(self, reason: str) -> None:
        self._fault = reason
        raise UntraceableError(reason)


def _operators(reads: ReadingNothing) -> AbstractContextManager[Any]:
    """Make a dispatch mode that checks the arguments of all basic operators."""

    class Reading(_torch.DispatchMode):  # type: ignore[misc]
        # Higher-order operators pass through the mode unchanged.
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            # The compiler refuses to work under others, and some layers call it.
            return True

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function not in FRESH:
                reads.verify(args, kwargs)
            return function(*args, **(kwargs or {}))

    mode: AbstractContextManager[Any] = Reading()
    return mode
