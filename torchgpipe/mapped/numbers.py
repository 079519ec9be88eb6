"""The RNG state of a course, which it carries from device to device.

A micro-batch continues its random sequence from device to device, as under
:class:`~torchgpipe.GPipe`. So dropout does not depend on the map. Here code between mapped modules
may draw, too, on any device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchgpipe.ambient.generators import content, generator_of
from torchgpipe.ambient.notes import contextmanager
from torchgpipe.ambient.random_numbers import CellNumbers, StepNumbers, get_state, set_state

__all__: list[str] = []


class CourseNumbers:
    """The generators while the course of a micro-batch runs.

    Args:
        numbers: the RNG states of the step.
        i: the number of the micro-batch.
        devices: all devices of the map; code in front of the first mapped module is taken to
            compute on the first of them.
        alone: whether no other course runs at the same time. Otherwise draws are followed only on
            the device where the course is.
    """

    def __init__(
        self, numbers: StepNumbers, i: int, devices: Sequence[torch.device], alone: bool = True
    ) -> None:
        self._numbers, self._i = numbers, i
        self._states = numbers.states[i]
        self._all = [*dict.fromkeys(map(generator_of, devices))]
        #: The generators to compare: none if another course may draw from them.
        self._generators = self._all if alone else []
        #: Whether code has drawn on another device than that of the present cell.
        self.drawn_behind = False
        #: The state that each generator was seen in last.
        self._known: dict[torch.device, Tensor] = {}
        for device in self._generators:
            self._known[device] = self._states[device.type]
            set_state(device, self._known[device])
        self._here: CellNumbers | None = None
        self.go_to(devices[0])

    def go_to(self, device: torch.device) -> None:
        """Set the course's RNG state on a device, and save it from the one before."""
        self.leave()
        here = self._numbers.of(self._i, device)
        self._look(here.device)
        here.__enter__()
        self._here = here

    def end(self) -> None:
        """Save the RNG state, also where code has drawn on another device."""
        self.leave()
        for device in self._generators:
            self._look(device)

    def leave(self) -> None:
        """Save the RNG state of the present device, and leave the device."""
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
        """Check that a module in a checkpoint of PyTorch draws nothing if accelerators are several.

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
