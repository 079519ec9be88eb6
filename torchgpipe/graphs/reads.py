"""Reading the value of a tensor, which would be a constant of a graph, though it may change.

A graph has the tensors of the layers as arguments, and fake ones take their places in a trace. A
tensor with data is another one then: an object, a closure or a global variable has it. Whoever
computes with it, reads a number of it or takes it as an index is found out by the operator that
does so. Some functions look at it without an operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchgpipe import _torch
from torchgpipe.graphs.places import UntraceableError
from torchgpipe.values import trees

__all__: list[str] = []

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
#: Likewise, attributes.
ASKING = [Tensor.shape, Tensor.ndim, Tensor.dtype, Tensor.device, Tensor.requires_grad]

REASON = "it uses a tensor that is not among its parameters, buffers and attributes"


class ReadingNothing(TorchFunctionMode):
    """Refuse to read tensors with data in a ``with`` block, in which others are fake.

    Args:
        state: the fake tensors of the layers.

    Raises:
        UntraceableError: somebody has read one, or the gradient that a weight has.
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
        # Ctrl-C goes on.
        if self._fault and (error[0] is None or issubclass(error[0], Exception)):
            # Layers may have caught the first one.
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
        """Check that no tensor with data is among some arguments.

        Raises:
            UntraceableError: one is.
        """
        for x in trees.leaves_of(arguments):
            if isinstance(x, Tensor) and not isinstance(x, _torch.FakeTensor):
                self._refuse(REASON)

    def _refuse(self, reason: str) -> None:
        self._fault = reason
        raise UntraceableError(reason)


def _operators(reads: ReadingNothing) -> AbstractContextManager[Any]:
    """Have all operators looked at, where composite ones have become basic ones."""

    class Reading(_torch.DispatchMode):  # type: ignore[misc]
        # It leaves them as they are.
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
