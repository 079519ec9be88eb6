"""Figures of a step: what a trace has measured, and what a plan had predicted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchgpipe.show.span import Span
from torchgpipe.show.timeline import Timeline

__all__ = ["CellTimes", "PlanFigures", "StepFigures"]


@dataclass(frozen=True)
class CellTimes:
    """The mean times of a micro-batch, in milliseconds; None for what was not computed."""

    forward: float | None = None
    recompute: float | None = None
    backward: float | None = None


@dataclass(frozen=True)
class StepFigures:
    """The figures of a step that was traced.

    Args:
        time: milliseconds from the start of its first piece of work to the end of the last one.
        stages: the times of each partition.
        places: the times of each device, by its name: those of all its partitions together.
        memory: the most bytes of each device during the whole trace, by its name.
        host: the bytes of the host's memory that each device has for what cells keep there.
    """

    time: float
    stages: Mapping[int, CellTimes] = field(default_factory=dict)
    places: Mapping[str, CellTimes] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> StepFigures | None:
        """The figures of the last step of a timeline; None if it has none."""
        if not timeline.spans:
            return None
        last = timeline.step()
        computed = [x for x in last.spans if x.computes and x.stage is not None]
        stages: dict[int, list[Span]] = {}
        places: dict[str, list[Span]] = {}
        for span in computed:
            assert span.stage is not None
            stages.setdefault(span.stage, []).append(span)
            places.setdefault(span.stream.device_name, []).append(span)
        return cls(
            last.makespan,
            {j: _times(spans) for j, spans in stages.items()},
            {name: _times(spans) for name, spans in places.items()},
            dict(timeline.memory),
            dict(timeline.host),
        )


def _times(spans: Iterable[Span]) -> CellTimes:
    """The mean time of a micro-batch for each kind: the sum of its spans of that kind."""
    total: dict[str, float] = {}
    cells: dict[str, set[int | None]] = {}
    for span in spans:
        kind = "B" if span.kind in "IW" else span.kind
        total[kind] = total.get(kind, 0.0) + span.time
        cells.setdefault(kind, set()).add(span.microbatch)
    mean = {kind: float(total[kind]) / len(cells[kind]) for kind in total}
    return CellTimes(mean.get("F"), mean.get("R"), mean.get("B"))


@dataclass(frozen=True)
class PlanFigures:
    """The figures that a plan has for a step, and the settings that they are for.

    Args:
        time: milliseconds of a step.
        memory: the most bytes of each device, by its name.
        chunks: the number of micro-batches.
        modes: the checkpoint mode of each partition.
        schedule: the name of the schedule; None for the order of :class:`~torchgpipe.GPipe`.
    """

    time: float
    memory: Mapping[str, int]
    chunks: int
    modes: Sequence[str]
    schedule: str | None = None

    def holds(self, chunks: int, modes: Sequence[str], schedule: object) -> bool:
        """Whether the settings are still those of the plan."""
        planned = self.chunks, [*self.modes], self.schedule
        return planned == (chunks, [*modes], schedule)
