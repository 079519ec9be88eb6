"""The waits of the host for devices, within the code of cells, as ``.item()`` makes it wait.

A computation that runs while it is issued takes as long as the host does, and one that the host
waits for takes the host as long as itself. Times around the cell cannot tell one from the other. So
the functions that may wait are looked at in the first micro-batch: the host has waited in one if
the device had work to do when the function was called, and none when it was done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.recorder import Mark, Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream

__all__: list[str] = []

#: The milliseconds of work, at least, that a device has left when the host begins to wait for it.
APART = 0.005

#: The functions that may wait: those with a number, a list or a shape that depends on values.
NAMES = {"__bool__", "__complex__", "__contains__", "__float__", "__getitem__", "__index__"}
NAMES |= {"__int__", "__setitem__", "allclose", "argwhere", "bincount", "cpu", "equal"}
NAMES |= {"is_nonzero", "item", "masked_select", "nonzero", "numpy", "repeat_interleave", "to"}
NAMES |= {"tolist", "unique", "unique_consecutive"}


#: The time of the host before a call, when the device is done with what it was given, and the time
#: of the host behind the call.
Sample: TypeAlias = tuple[WorkTimes, WorkTimes, WorkTimes]


@dataclass(frozen=True)
class Wait:
    """The wait of the host in the forward of a cell.

    Args:
        time: the milliseconds that it waits.
        tail: those that the device goes on for behind the last wait, before the cell ends.
    """

    time: float
    tail: float


class Waits:
    """The waits of the first micro-batch of each stage, of the last step.

    Args:
        recorder: takes the times.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: dict[int, list[Sample]] = {}
        recorder.at_steps.append(self._seen.clear)

    def within(self, mark: Mark) -> Looking:
        """A mode that looks at the functions that the layers of a cell call."""
        return Looking(self._recorder, mark.stream.device, self._seen.setdefault(mark.stage, []))

    def found(self, ends: Mapping[int, float]) -> dict[int, Wait]:
        """The waits by stage, once the devices are done.

        Args:
            ends: the end of the first forward of each stage, on the recorder's clock.
        """
        found: dict[int, Wait] = {}
        for j, samples in self._seen.items():
            waited, last = 0.0, None
            for before, at, after in samples:
                start, behind = (self._recorder.bounds(x)[0] for x in (before, after))
                until = self._recorder.bounds(at)[0]
                # What the device had to do then, and whether the host went on before it was done.
                if until > start + APART and until <= behind + APART:
                    waited += behind - start
                    last = behind
            if last is not None and j in ends:
                found[j] = Wait(waited, max(0.0, ends[j] - last))
        return found


class Looking(TorchFunctionMode):
    """The mode of one call of layers."""

    def __init__(self, recorder: Recorder, device: torch.device, seen: list[Sample]) -> None:
        super().__init__()
        self._recorder, self._device, self._seen = recorder, device, seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a function, and take the times if it may wait."""
        if getattr(func, "__name__", "") not in NAMES:
            return func(*args, **(kwargs or {}))
        before = self._recorder.issued(self._device)
        at = self._recorder.before(current_stream(self._device))
        result = func(*args, **(kwargs or {}))
        self._seen.append((before, at, self._recorder.issued(self._device)))
        return result
