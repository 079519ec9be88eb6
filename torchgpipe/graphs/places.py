"""Places: where modules hold their tensors, and the attributes that decide what they compute.

A graph is traced with fake tensors in these places. It is valid for the state that the modules had
then: which modules and tensors there are, of which kinds, and the plain values in attributes. So
before each step, that state is compared with the present one. What else the code of layers reads
has to stay as it was. A trace refuses to read tensors of other places.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe._torch.attributes import has_global_hooks, storage_of
from torchgpipe.ambient.context import leave_checkpoints
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.values.structure import MISSING, leaves_of

__all__: list[str] = []

#: Names of attributes that nn.Module sets itself. Lists, tuples and dicts in all other attributes
#: are state of the layer, on which its graph depends.
OWN = {*nn.Module().__dict__}

CONTAINERS = (list, tuple, dict)


class UntraceableError(Exception):
    """A stage cannot be a graph. The message says why, as the end of a sentence."""


class Places:
    """The state of some modules: parameters, buffers, and attributes.

    Args:
        modules: the modules, with all that is in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [*dict.fromkeys(x for some in modules for x in some.modules())]
        #: For each module, its dict of attributes and that of its submodules, for ``are_current``.
        self._tables = [table for x in self._modules for table in (x.__dict__, x._modules)]
        self._stores = [table for x in self._modules for table in (x._parameters, x._buffers)]
        self._keys: list[tuple[dict[str, Any], str]] = [
            (table, key)
            for table in (*self._tables[::2], *self._stores)
            for key, x in table.items()
            if isinstance(x, Tensor)
        ]
        self._containers = [
            (module, key)
            for module in self._modules
            for key, x in module.__dict__.items()
            if key not in OWN and isinstance(x, CONTAINERS)
        ]
        self._before = [*map(dict, self._tables)]
        self._now = self._look()

    def read(self) -> list[Tensor]:
        """The tensors that are in the places now, each once."""
        return [*{id(x): x for x in (table[key] for table, key in self._keys)}.values()]

    @property
    def has_hooks(self) -> bool:
        """Whether hooks run around the forward or the backward of a module."""
        return has_global_hooks() or any(
            x._forward_hooks or x._forward_pre_hooks or x._backward_hooks or x._backward_pre_hooks
            for x in self._modules
        )

    def are_current(self) -> bool:
        """Whether the modules are in the same state as before."""
        try:
            # ``==`` of dicts tries ``is`` first, so no elements of unchanged tensors are compared.
            return self._tables == self._before and self._look() == self._now
        except Exception:
            # Raised by ``==`` of some objects, such as arrays, or because a tensor is gone. The
            # state counts as changed.
            return False

    def _look(self) -> Any:
        tensors = [table[key] for table, key in self._keys]
        first: dict[int, int] = {}
        # Tied places get the same number: a graph is valid only while the same places are tied.
        ties = [first.setdefault(id(x), len(first)) for x in tensors]
        # 1, 1.0 and True are equal, but layers may tell them apart, so types are compared, too.
        types = [[*map(type, x.values())] for x in self._tables]
        stores = [(*x, *map(type, x.values())) for x in self._stores if x]
        return (
            *(kinds(tensors), ties, types, stores, [*map(type, self._modules)], self.has_hooks),
            [(type(x), [(k, _plain(y)) for k, y in _items(x).items()]) for _, x in self._held()],
        )

    def _held(self) -> list[tuple[str, Any]]:
        """The containers in attributes, and those within them, each with the attribute's name."""
        containers: dict[int, tuple[str, Any]] = {}
        stack = [
            (f"{type(module).__name__}.{key}", module.__dict__[key])
            for module, key in self._containers
        ]
        while stack:
            name, x = stack.pop()
            if isinstance(x, CONTAINERS) and id(x) not in containers:
                containers[id(x)] = name, x
                stack += [(name, y) for y in _items(x).values()]
        return [*containers.values()]

    def difference(self, other: Places) -> str:
        """The name of an attribute that differs in ``other``, which is of the same modules."""
        for module, now, before in zip(self._modules, self._before[::2], other._before[::2]):
            if key := _different(now, before):
                return f"{type(module).__name__}.{key}"
        return "a list or a dict"

    @contextmanager
    def put(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Put other tensors in the places, in the order of :meth:`read`, in a ``with`` block.

        Raises:
            UntraceableError: layers have put yet others there, or replaced their memory.
        """
        others = dict(zip(map(id, self.read()), tensors))
        places = [(table, key, table[key]) for table, key in self._keys]
        memory = [*map(storage_of, tensors)]
        moved = False
        for table, key, tensor in places:
            other = table[key] = others[id(tensor)]
            # Layers may read attributes that were set on a parameter, so its fake tensor gets them.
            other.__dict__.update({**tensor.__dict__, **other.__dict__})
        try:
            yield
        finally:
            for table, key, tensor in places:
                moved |= table.get(key) is not others[id(tensor)]
                table[key] = tensor
        if moved or memory != [*map(storage_of, tensors)]:
            raise UntraceableError("it replaces a buffer in its forward")

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore all attributes after a ``with`` block, and the lists and dicts in them.

        Raises:
            UntraceableError: the block has changed some.
        """
        names = [type(x).__name__ for x in self._modules for _ in range(2)]
        tables = [*zip(names, self._tables), *zip(names, self._stores), *self._held()]
        before = [_items(table) for _, table in tables]
        changed: list[str] = []
        try:
            yield
        finally:
            for (name, table), items in zip(tables, before):
                if key := _different(_items(table), items):
                    changed.append(f"{name}.{key}")
                    # A trace may have put fake tensors into the dict or list.
                    table.clear()
                    if isinstance(table, dict):
                        table.update(items)
                    else:
                        table.extend(items.values())
        if changed:
            raise UntraceableError(f"its forward changes attributes ({changed[0]})")


def _items(container: Any) -> dict[Any, Any]:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _plain(value: Any) -> Any:
    """Type of an item, with the item itself unless that is a tensor, or looked at elsewhere."""
    return type(value) if isinstance(value, (Tensor, *CONTAINERS)) else (type(value), value)


def _different(now: dict[Any, Any], before: dict[Any, Any]) -> str:
    """The first key whose values are two objects; empty if there is none."""
    keys = {**before, **now}
    return next((str(x) for x in keys if now.get(x, MISSING) is not before.get(x, MISSING)), "")


def kinds(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """The properties of tensors that a graph depends on."""
    return tuple(
        [
            (x.shape, x.stride(), x.dtype, x.requires_grad)
            + (x.device, type(x), x.is_conj(), x.is_neg())
            for x in tensors
        ]
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


# Reads of tensors that are not among the layers' own, which a trace refuses.
#
# The tensors of the layers are arguments of a graph, and in a trace they are fake. So a tensor with
# data comes from elsewhere: from an object, a closure or a global variable. It would become a
# constant of the graph, though it may change. Code reads such a tensor by an operator, or by one of
# the functions in ``READING``.


#: Operators that PyTorch calls on a tensor made of numbers in the code, as by
#: ``torch.tensor(2.0)``. A trace lets them take a tensor with data, as a constant of the graph.
FRESH = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift.default,
)

#: Names of functions that read a tensor's memory, shape, dtype or device without an operator. A
#: trace refuses to call them on a tensor with data.
READING = {
    *("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__reduce_ex__", "__deepcopy__", "untyped_storage", "storage", "apply_", "map_"),
    *("tensor", "as_tensor", "asarray"),
    *("__len__", "size", "numel", "nelement", "dim", "ndimension", "stride"),
    *("to", "type_as", "view_as", "expand_as", "reshape_as"),
}
#: Attributes of tensors that a trace refuses to read from a tensor with data.
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
        # Only an Exception is replaced: a KeyboardInterrupt must reach the caller.
        if self._fault and (error[0] is None or issubclass(error[0], Exception)):
            # Raised again, since layers may have caught the error that ``_refuse`` raised.
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
        # Under a mode without this attribute, PyTorch refuses higher-order operators.
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            # Under a mode that returns False here, functions of torch.compile run eagerly, and
            # some layers need them compiled.
            return True

        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function not in FRESH:
                reads.verify(args, kwargs)
            return function(*args, **(kwargs or {}))

    mode: AbstractContextManager[Any] = Reading()
    return mode
