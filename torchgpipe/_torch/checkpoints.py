"""Checkpoints of PyTorch around a draw, and the random numbers that they keep.

A checkpoint reads the state of the CPU's default generator before its function runs, and sets it in
backward, where that function runs again. Neither is an operator, so only the stack of a draw shows
the checkpoint. (Its other kind, with ``use_reentrant=True``, cannot run within a schedule.)
"""

from __future__ import annotations

import ctypes
import sys
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from torchgpipe import _torch

__all__: list[str] = []

#: The local variables of a checkpoint: its state, and an object that each second run has anew.
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
        with an object that stands for this second run.
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
    """The generator of a second run, which begins with the state that the checkpoint keeps."""
    known: Any
    generator: torch.Generator | None
    known, generator = vars(state).get(RUN, (None, None))
    # guard: second runs begin anew
    if generator is None or known is not run:
        generator = torch.Generator()
        generator.set_state(state)
        vars(state)[RUN] = run, generator
    return generator
