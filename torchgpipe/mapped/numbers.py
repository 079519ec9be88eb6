"""The random numbers of a course, which travel with it from device to device.

A micro-batch draws, on the next device, the numbers that follow those it drew on the one before, as
under :class:`~torchgpipe.GPipe`. So dropout does not depend on the map. Here code between mapped
modules draws, too, on whatever device it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchgpipe.ambient.defaults import content, generator_of
from torchgpipe.ambient.random_numbers import CellNumbers, StepNumbers, get_state, set_state
from torchgpipe.values.blocks import contextmanager

__all__: list[str] = []


class CourseNumbers:
    """The generators while a micro-batch is on its way.

    Args:
        numbers: the numbers of the step.
        i: the number of the micro-batch.
        devices: all devices of the map; code in front of the first mapped module is taken to
            compute on the first of them.
        alone: whether no other micro-batch is on its way at the same time. Otherwise code draws
            nowhere but on the device where the micro-batch is.
    """

    def __init__(
        self, numbers: StepNumbers, i: int, devices: Sequence[torch.device], alone: bool = True
    ) -> None:
        self._numbers, self._i = numbers, i
        self._states = numbers.states[i]
        self._all = [*dict.fromkeys(map(generator_of, devices))]
        #: The generators to look after: none if they may be another micro-batch's.
        self._generators = self._all if alone else []
        #: Whether code has drawn on a device behind the cell that was on its way.
        self.drawn_behind = False
        #: The state that each generator was seen in last.
        self._known: dict[torch.device, Tensor] = {}
        for device in self._generators:
            self._known[device] = self._states[device.type]
            set_state(device, self._known[device])
        self._here: CellNumbers | None = None
        self.go_to(devices[0])

    def go_to(self, device: torch.device) -> None:
        """Go on drawing on a device."""
        self.leave()
        here = self._numbers.of(self._i, device)
        self._look(here.device)
        here.__enter__()
        self._here = here

    def end(self) -> None:
        """Take along what was drawn, also by code on another device."""
        self.leave()
        for device in self._generators:
            self._look(device)

    def leave(self) -> None:
        """Take along what was drawn, and draw no more."""
        here = self._here
        if here is not None:
            here.__exit__()
            self._known[here.device] = self._states[here.kind]
            self._here = None

    def _look(self, device: torch.device) -> None:
        if self._generators:
            state = get_state(device)
            if content(state) != content(self._known[device]):
                self._states[device.type] = self._known[device] = state
                self.drawn_behind = True

    @contextmanager
    def undrawn(self, name: str, device: torch.device) -> Iterator[None]:
        """Check that a module in a checkpoint of PyTorch draws no numbers of several accelerators.

        In backward each accelerator has a thread. Such a checkpoint sets the generators of all
        devices that its arguments are on, which other threads draw from at the same time.

        Raises:
            RuntimeError: the module drew numbers.
        """
        generator = generator_of(device)
        several = sum(x.type == generator.type for x in self._all) > 1
        before = get_state(generator) if several else None
        yield
        if before is not None and content(before) != content(get_state(generator)):
            raise RuntimeError(
                "a checkpoint of PyTorch cannot repeat random numbers while several devices run "
                f"backward (module: {name}, device: {device}); use the checkpoints of MappedGPipe "
                "instead of the model's own, or switch dropout off"
            )
