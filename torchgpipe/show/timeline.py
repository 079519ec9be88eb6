"""A timeline: the spans of some steps, with their pictures and shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Protocol

from torchgpipe.checks import checked_path, verify_kind
from torchgpipe.show.bars import Panel, svg
from torchgpipe.show.chart import characters, panel, png, to_json
from torchgpipe.show.shares import Shares, shares, table
from torchgpipe.show.span import Span

__all__: list[str] = ["Timeline", "Advice"]


# Advice: the one change of a model's settings that is expected to gain the most.


@dataclass(frozen=True)
class Advice:
    """A change, why it helps, and what it is expected to gain.

    Args:
        reason: what takes the time now.
        change: the settings to change, such as ``{"chunks": 16}``; empty if it is the code that has
            to change.
        gain: the share of the step's time that is expected to be saved.
        caution: what has to be seen to, such as memory; empty if nothing.
        remedy: what to change in words: in the code, or in a setting too long for a sentence, such
            as a device map; empty if settings say it.
    """

    reason: str
    change: Mapping[str, Any]
    gain: float
    caution: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        change = ", ".join(f"{name}={value!r}" for name, value in self.change.items())
        text = f"{self.reason}: {self.remedy or change} is expected to take {self.gain:.0%} less"
        return f"{text} ({self.caution})" if self.caution else text


#: What to do where virtual accelerators have no costs.
UNTIMED = (
    "nothing took any time, as on virtual accelerators without costs; run the step within "
    "torchgpipe.testing.observe(costs={'addmm': 1, 'mm': 1}), or costs='measured'"
)


class AdviceSource(Protocol):
    """A source of advice."""

    @property
    def advice(self) -> Advice | None:
        """The change that is expected to gain the most."""


@dataclass
class Timeline:
    """The spans of some steps, from measuring, virtual accelerators or a simulation.

    Print it to see the last step: a row for each stream that computes, with time from left to
    right, the shares of each device, and advice if there is any.

    Args:
        spans: the spans, in the order in which they were issued.
        advisor: tells which change is expected to gain the most; None without advice.
        memory: the most bytes that tensors occupied on each device, by its name.
        host: the bytes of the host's memory that each device has for what cells keep there.
        unit: the unit of time.
        title: a line above its picture.
    """

    spans: Sequence[Span] = field(repr=False)
    memory: Mapping[str, int] = field(default_factory=dict)
    unit: str = "ms"
    advisor: AdviceSource | None = field(default=None, repr=False, compare=False)
    title: str = ""
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def advice(self) -> Advice | None:
        """The change that is expected to gain the most; None if there is none worth it.

        It is found by simulating the last step with other settings, which may take a second.
        """
        return None if self.advisor is None else self.advisor.advice

    @property
    def makespan(self) -> float:
        """The time from the start of the first span to the end of the last one."""
        first = min((span.start for span in self.spans), default=0.0)
        return max((span.end for span in self.spans), default=0.0) - first

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps."""
        return sorted({span.step for span in self.spans})

    def step(self, number: int = -1) -> Timeline:
        """The timeline of one step, which begins at 0.

        Args:
            number: the place of the step among all; a negative one counts from the end.

        Raises:
            IndexError: there are fewer steps.
        """
        steps = self.steps
        verify_kind(number, int, "steps are numbered", "number", "pass -1 for the last one")
        if not -len(steps) <= number < len(steps):
            raise IndexError(
                f"there must be a step of this number (number: {number}, steps: {len(steps)}); "
                "run more steps within the trace"
            )
        spans = [span for span in self.spans if span.step == steps[number]]
        first = min(span.start for span in spans)
        moved = [
            replace(
                span,
                start=span.start - first,
                end=span.end - first,
                after=-1,
                issued=None if span.issued is None else span.issued - first,
            )
            for span in spans
        ]
        return replace(self, spans=moved)

    @property
    def shares(self) -> list[Shares]:
        """The shares of the last step's time that each stream computed, waited and so on."""
        return shares(self.step().spans) if self.spans else []

    def __str__(self) -> str:
        if not self.spans:
            return (
                "no cells: no step of a wrapped model ran within the block; call the model, and "
                "loss.backward(), within the with block"
            )
        last = self.step()
        count = len(self.steps)
        head = f"step of {last.makespan:.6g} {self.unit}" + (
            f", the last of {count}" if count > 1 else ""
        )
        parts = [head, characters(last.spans), table(last.shares, self.memory, self.host)]
        if not last.makespan:
            parts.append(UNTIMED)
        elif self.advice:
            parts.append(str(self.advice))
        return "\n\n".join(parts)

    def svg(self, path: str | PathLike[str], *others: Timeline, scale: float | None = None) -> None:
        """Draw the last step into an SVG file, above those of other timelines on the same scale.

        Args:
            path: the file.
            *others: further timelines, such as a simulated one, ``report.timeline``.
            scale: pixels per unit of time; chosen to fit the numbers if None.
        """
        panels = self._panels(others)
        checked_path(path).write_text(svg(panels, scale), encoding="utf-8")

    def png(self, path: str | PathLike[str], *others: Timeline) -> None:
        """Draw the last step into a PNG file, as :meth:`svg` does.

        Raises:
            ImportError: matplotlib is not installed.
        """
        png(checked_path(path), self._panels(others))

    def _panels(self, others: Sequence[Timeline]) -> list[Panel]:
        """The last step of each timeline that has any."""
        remedy = "pass such as simulate(schedule).timeline"
        for x in others:
            verify_kind(x, Timeline, "a timeline is drawn beside others", "others", remedy)
        return [x._panel() for x in (self, *others) if x.spans]

    def _panel(self) -> Panel:
        return panel(self.step().spans, self.unit)._replace(title=self.title)

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write all steps as a file that https://ui.perfetto.dev and chrome://tracing open."""
        checked_path(path).write_text(to_json(self.spans), encoding="utf-8")
