"""The reads that would become constants of a graph: of values, and of unknown generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe.graphs.places import UntraceableError
from torchgpipe.values import trees

__all__: list[str] = []


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
        self._operators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
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
        for x in trees.leaves_of(arguments):
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


# Random numbers that a graph cannot draw: those of Python and NumPy, and seeds of PyTorch.


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """Check that a block leaves these generators alone, and restore them if it does not.

    Draws from PyTorch's own generator are part of the graph. Other threads may draw from it at the
    same time, so only a new seed counts. For the other generators it is unknown which thread has
    drawn: if another one has, it may draw the same numbers again.

    Raises:
        UntraceableError: the block has drawn from the others, or seeded PyTorch's.
    """
    # If NumPy is not imported, nobody has drawn from its generator.
    numpy: Any = sys.modules.get("numpy")
    mine, state = random.getstate(), torch.get_rng_state()
    other: Any = numpy.random.get_state() if numpy else None
    seed = torch.initial_seed()
    moved = False
    try:
        yield
    finally:
        if _is_seeded(seed, state):
            moved = True
            torch.set_rng_state(state)
        if random.getstate() != mine:
            moved = True
            random.setstate(mine)
        if numpy:
            now = numpy.random.get_state()
            if (now[1].tobytes(), *now[2:]) != (other[1].tobytes(), *other[2:]):
                moved = True
                numpy.random.set_state(other)
    if moved:
        raise UntraceableError("it draws random numbers of Python or NumPy, or seeds PyTorch's")


def _is_seeded(seed: int, state: Tensor) -> bool:
    """Whether PyTorch's generator was seeded since, maybe with the same seed."""
    if torch.initial_seed() != seed:
        return True
    now = torch.get_rng_state()
    if torch.equal(now, state):
        return False
    return torch.equal(now, torch.Generator().manual_seed(seed).get_state())
