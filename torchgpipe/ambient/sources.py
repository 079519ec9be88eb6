"""Sources: the generators that operators of a cell draw from on the CPU.

All threads share the CPU's default generator. So cells that several threads compute draw from
generators of their own (:class:`Own`), and none from the default one. That works for operators, but
not for layers that set or seed the default generator themselves, which shows only when they run. So
cells first run one at a time: they draw from the default generator, and its state is compared
before and after each draw (:class:`Watched`).

Checkpoints of PyTorch within layers set the default generator, too. They save the state of the
cell's generator, and their recomputation gets a generator of its own.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from torchgpipe._torch import checkpoints
from torchgpipe.ambient.defaults import content, default_state, set_default_state
from torchgpipe.devices.streams import CPU

__all__: list[str] = []


class Own:
    """A generator of its own, made when the cell first draws.

    Args:
        state: the state that it begins with.
    """

    __slots__ = ("_generator", "_state")

    def __init__(self, state: Tensor) -> None:
        self._state: Tensor | None = state
        self._generator: torch.Generator | None = None

    def get_state(self) -> Tensor:
        """The state."""
        if self._generator is not None:
            return self._generator.get_state()
        assert self._state is not None
        return self._state

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        self._state, self._generator = state, None

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        if self._generator is None:
            state = self.get_state()
            self._generator = torch.Generator()
            self._generator.set_state(state)
        first, again = checkpoints.find()
        # guard: second runs of PyTorch's checkpoints
        generator = self._generator if again is None else checkpoints.generator_again(*again)
        for state in first:
            checkpoints.keep(state, generator)
        return generator

    def end(self) -> None:
        """Take note that the draw has ended."""


class Watched:
    """The default generator, in a cell during which no other thread draws."""

    __slots__ = ("_known", "touched")

    def __init__(self) -> None:
        self._known = b""
        #: Whether layers have set or seeded the generator themselves.
        self.touched = False

    def start(self) -> None:
        """Record the state, which only operators should change from here on."""
        self._known = content(default_state(CPU))

    def look(self) -> None:
        """Check whether the state has changed since it was recorded."""
        # guard: layers that set the generator
        self.touched |= content(default_state(CPU)) != self._known

    def get_state(self) -> Tensor:
        """The state."""
        return default_state(CPU)

    def set_state(self, state: Tensor) -> None:
        """Set the state."""
        set_default_state(CPU, state)
        self._known = content(state)

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        self.look()
        return None

    def end(self) -> None:
        """Take note that the draw has ended."""
        self.start()


class Elsewhere:
    """The default generator, in a thread of autograd's that runs the backward of a cell."""

    def begin(self) -> torch.Generator | None:
        """Begin a draw; return the generator to use, or None for the default one."""
        _, again = checkpoints.find()
        return None if again is None else checkpoints.generator_again(*again)

    def end(self) -> None:
        """Take note that the draw has ended."""


Source: TypeAlias = Own | Watched
