"""Random operators of a thread draw from its own generator, also within PyTorch's checkpoints."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel

from torchgpipe import _torch
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe._torch.names import NAMES, has

__all__: list[str] = []


# Checkpoints of PyTorch around a draw, and the random numbers that they keep.
#
# A checkpoint reads the state of the CPU's default generator before its function runs, and sets
# it in backward, where that function runs again. Neither is an operator, so only the stack of a
# draw shows the checkpoint. (Its other kind, with ``use_reentrant=True``, cannot run within a
# schedule.)


#: The local variables of a checkpoint: its state, and an object that each recomputation has anew.
STATE, RUN = "fwd_cpu_state", "device_autocast_ctx"


def can_find() -> bool:
    """Whether this PyTorch has its local variables where :func:`find` looks for them."""
    function = _torch.checkpoint_of.__code__
    again = [x for x in function.co_consts if getattr(x, "co_name", "") == "recompute_fn"]
    return any(
        STATE in code.co_freevars and RUN in code.co_varnames + code.co_cellvars for code in again
    )


def find() -> tuple[list[Tensor], tuple[Tensor, Any] | None]:
    """Find the checkpoints around the caller, from the inside, up to one that runs again.

    Returns:
        The states that those in their first runs keep; and the state of the one that runs again,
        with an object that stands for this recomputation.
    """
    function = _torch.checkpoint_of.__code__
    first: list[Tensor] = []
    frame = sys._getframe(1)
    while (back := frame.f_back) is not None:
        frame = back
        if frame.f_code.co_filename != function.co_filename:
            continue
        values = frame.f_locals
        if frame.f_code.co_name == "recompute_fn":
            if STATE in values:
                return first, (values[STATE], values[RUN])
            continue
        checkpoint = values.get("gen")
        if isinstance(checkpoint, GeneratorType) and checkpoint.gi_code is function:
            suspended: Any = checkpoint.gi_frame
            state = suspended.f_locals.get(STATE)
            first.extend([] if state is None else [state])
    return first, None


def keep(state: Tensor, generator: torch.Generator) -> None:
    """Have a checkpoint in its first run keep the state of a generator, before it first draws."""
    # guard: first runs of PyTorch's checkpoints
    if STATE not in vars(state):
        vars(state)[STATE] = True
        now = generator.get_state()
        # Not by an operator, which modes would see.
        ctypes.memmove(state.data_ptr(), now.data_ptr(), now.nbytes)


def generator_again(state: Tensor, run: Any) -> torch.Generator:
    """The generator of a recomputation, which begins with the state that the checkpoint keeps."""
    known: Any
    generator: torch.Generator | None
    known, generator = vars(state).get(RUN, (None, None))
    # guard: recomputations begin anew
    if generator is None or known is not run:
        generator = torch.Generator()
        generator.set_state(state)
        vars(state)[RUN] = run, generator
    return generator


# Operators that draw random numbers: a thread may have them draw from a generator of its own.
#
# The CPU's default generator is one for all threads. PyTorch has a dispatch key that it keeps for
# its own tests. Each operator that draws gets a kernel for that key, which may put another
# generator among the operator's arguments. Only threads that include the key get there, as they
# do within :func:`seeing`, so nothing changes for anybody else.
#
# What makes a tensor of random numbers, as :func:`torch.rand` does, fills it by an operator that
# has a generator among its arguments.


KEY = "TESTING_ONLY_GenericMode"

#: The operators that draw, and that have no generator among their arguments.
MAKERS = {"rand", "randn", "randint", "randperm", "native_dropout"}
MAKERS |= {"rand_like", "randn_like", "randint_like"}


class Source(Protocol):
    """The generators that the operators of a thread draw from."""

    def begin(self) -> torch.Generator | None:
        """The generator of the draw that begins; None for the default one."""

    def end(self) -> None:
        """Take note that the draw has ended."""


Find = Callable[[], Source]

#: PyTorch has the kernels as long as these exist.
_libraries: list[Library] = []


@cache
def can_see(find: Find) -> bool:
    """Register the kernels, once; tell whether this PyTorch allows it.

    Args:
        find: finds the source of the calling thread.
    """
    feature = NAMES["including"].feature
    needed = [name for name, x in NAMES.items() if x.feature == feature]
    if not all(map(has, needed)) or not can_find():
        return False
    try:
        _libraries.extend([Library("_", "IMPL", KEY), Library("aten", "IMPL", KEY)])
        _libraries[0].fallback(fallthrough_kernel)
        _register(_libraries[1], find)
    except RuntimeError:
        # Somebody else has the key.
        return False
    return True


def seeing() -> AbstractContextManager[Any]:
    """Context manager that shows this thread's draws, and those of its backward, to its source."""
    including: AbstractContextManager[Any] = _torch.including(_key())
    return including


@cache
def _key() -> Any:
    return _torch.dispatch_key(KEY)


def _register(aten: Library, find: Find) -> None:
    after = _torch.keys_after(_key())
    plain = after
    for name in ("Python", "PythonTLSSnapshot"):
        plain = plain.remove(_torch.dispatch_key(name))
    for schema in _torch.schemas():
        room, _, name = schema.name.partition("::")
        names = [x.name for x in schema.arguments]
        is_maker = "generator" not in names
        if room != "aten" or (is_maker and name not in MAKERS):
            continue
        overload = schema.overload_name
        call = getattr(getattr(torch.ops.aten, name), overload or "default").redispatch
        if is_maker:
            kernel: Callable[..., Any] = partial(_make, call, after, plain)
        else:
            types = [str(x.type) for x in schema.arguments]
            if "out" not in names and "Tensor" not in types:
                continue
            places = names.index("generator"), types.index("Tensor")
            kernel = partial(_draw, call, after, places, find)
        aten.impl(f"{name}.{overload}" if overload else name, kernel, with_keyset=True)
    # These have no fallback for all of them.
    for operator in _torch.higher_operators.values():
        operator.fallthrough(_key())
    _torch.higher_fallthrough.append(_key())


@cache
def _default() -> int:
    # It may come as another object of Python's.
    generator: Any = torch.default_generator
    found: int = generator._cdata
    return found


@uncompiled
def _draw(
    call: Callable[..., Any],
    after: Any,
    places: tuple[int, int],
    find: Find,
    keys: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The kernel of an operator with a generator, and a tensor, at some places."""
    place, filled = places
    # Among arguments by place it is the last one.
    if len(args) > place:
        kwargs["generator"], args = args[place], args[:place]
    given = kwargs.get("generator")
    if given is None or given._cdata == _default():
        tensor: Tensor = args[filled] if filled < len(args) else kwargs["out"]
        # guard: draws on the CPU alone
        if tensor.device.type == "cpu" and not _is_traced():
            source = find()
            kwargs["generator"] = source.begin()
            found = call(keys & after, *args, **kwargs)
            source.end()
            return found
    return call(keys & after, *args, **kwargs)


@uncompiled
def _make(
    call: Callable[..., Any], after: Any, plain: Any, keys: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """The kernel of an operator without a generator, which calls another operator to draw."""
    # guard: draws within a mode
    if not _torch.count_dispatch_modes() or _is_traced():
        return call(keys & after, *args, **kwargs)
    # PyTorch excludes the key within a mode, and nobody would see the other operator.
    with _torch.without_modes():
        return call(keys & plain, *args, **kwargs)


def _is_traced() -> bool:
    """Whether operators are only noted down, as by the compiler, and draw nothing."""
    # guard: draws that are traced
    if not _torch.count_dispatch_modes():
        return False
    modes = _torch.OwnMode
    found = map(_torch.own_mode, (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))
    return any(mode is not None for mode in found)
