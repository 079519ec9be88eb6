"""A watch of a traced model: what the advisor has to know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean

import torch

from torchgpipe.advice.advisor import Advisor
from torchgpipe.advice.figures import figures_of
from torchgpipe.advice.layers import Layers
from torchgpipe.advice.replays import Traced
from torchgpipe.advice.setting import Setting
from torchgpipe.devices.measures import memory_total
from torchgpipe.devices.recorder import Recorder
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine.recorded import Traceable
from torchgpipe.engine.stages import stages_of
from torchgpipe.executor.plan import Choice
from torchgpipe.gpipe import GPipe
from torchgpipe.partition.arguments import modes_of
from torchgpipe.planner.room import Room
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.rehearsal import Step
from torchgpipe.scheduled import ScheduledLoss
from torchgpipe.timeline.shares import Shares
from torchgpipe.timeline.timeline import Timeline

__all__: list[str] = []


class Watch:
    """A model whose layers are timed until :meth:`stop`.

    Args:
        model: a wrapper. Nobody advises on other ones than :class:`GPipe` and
            :class:`ScheduledLoss`.
        recorder: takes the times.
    """

    def __init__(self, model: Traceable, recorder: Recorder) -> None:
        self._recorder = recorder
        self._choice: Choice | None = None
        self._model: GPipe | None = model if isinstance(model, GPipe) else None
        self._layers: Layers | None = None
        has_layers = True
        if isinstance(model, ScheduledLoss):
            self._model, self._choice = model.model, model.schedule
            # Graphs do not run layers, and a stage with hooks is none.
            has_layers = model.stages == "eager"
        # On the CPU, which is the host, too, there is no advice to time layers for.
        if self._model is not None and has_layers and all(map(has_streams, self._model.devices)):
            self._layers = Layers([*self._model.partitions], self._model.devices, recorder)

    def stop(self) -> None:
        """Leave the model alone."""
        if self._layers is not None:
            self._layers.stop()

    def end(self, timeline: Timeline) -> Advisor | None:
        """Make an advisor of what was seen, when the timeline has its spans.

        Returns:
            The advisor; None if there is no step to advise on.
        """
        layers = [] if self._layers is None else self._layers.found()
        model = self._model
        if model is None or not timeline.spans:
            return None
        last = timeline.step()
        if not {"B", "W"} & {x.kind for x in last.spans}:
            # Without a backward there are other settings to think of.
            return None
        shares = last.shares
        if not any(map(_computing, shares)) or any(x.host is None for x in shares):
            # Without costs, virtual accelerators take no time. The CPU is the host and the device.
            return None
        late = mean(x.host or 0.0 for x in shares)
        rows = 0 if self._layers is None else self._layers.rows
        by_autograd = self._choice is None
        figures = figures_of(last.spans, model.balance, by_autograd, layers, rows, late)
        setting = Setting(
            tuple(model.balance),
            _placement(model.devices, by_autograd),
            figures.chunks,
            modes_of(model.checkpoint, len(model.devices)),
            self._choice,
            tuple(stages_of(model).skip_layout.pairs),
        )
        slowest = max(shares, key=_computing)
        return Advisor(
            Traced(
                setting,
                figures,
                last.makespan,
                mean(x.bubble for x in shares),
                late,
                mean(x.recompute for x in shares),
                slowest.device,
                _computing(slowest) / mean(map(_computing, shares)) - 1,
                _in_use(timeline.memory),
                partial(_excess, model, figures.rows),
                self._kept(),
                timeline.memory,
                [str(device) for device in model.devices],
                {str(device): memory_total(device) for device in model.devices},
            )
        )

    def _kept(self) -> dict[int, float]:
        """The bytes that a cell of each partition keeps for its backward."""
        kept = self._recorder.kept()
        # Of a cell that is computed again, F keeps the output alone.
        return {j: max(0.0, kept.get(("R", j), size)) for (_, j), size in kept.items()}


def _computing(share: Shares) -> float:
    return share.busy + share.recompute


def _placement(devices: Sequence[torch.device], by_autograd: bool) -> tuple[int, ...]:
    """The worker of each partition."""
    if by_autograd:
        # Partitions of one device have a stream each.
        return tuple(range(len(devices)))
    order = [*dict.fromkeys(devices)]
    if len(order) == 1:
        return tuple(range(len(devices)))
    return tuple(order.index(x) for x in devices)


def _excess(
    model: GPipe, rows: int, setting: Setting, schedule: Schedule, order: Sequence[Step]
) -> float | None:
    """The bytes that a device has too little for a setting, if the plan of the model knows."""
    room: Room | None = stages_of(model).room
    if room is None:
        return None
    has_loss = setting.schedule is not None
    return room.excess(schedule, order, setting.balance, model.devices, rows, has_loss=has_loss)


def _in_use(memory: Mapping[str, int]) -> str:
    """Say how much memory the fullest device has had in use."""
    if not memory:
        return ""
    name = max(memory, key=memory.__getitem__)
    return f"; {name} has had {memory[name] / 2**20:.1f} MiB in use"
