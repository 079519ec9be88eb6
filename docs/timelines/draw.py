"""Draw the pictures of docs/see.rst: ``python docs/timelines/draw.py``."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torchgpipe.schedule import Costs, fill_drain, one_f_one_b, simulate
from torchgpipe.timeline.span import Stream
from torchgpipe.timeline.timeline import Timeline

FOLDER = Path(__file__).parent


def pictures() -> Iterator[tuple[str, Timeline]]:
    """Yield the name of each picture, and its timeline."""
    # Milliseconds of a model whose third partition has too much to do.
    forwards, halves = [2.1, 2.3, 3.4, 1.9], [2.0, 2.2, 3.3, 1.8]
    schedule = fill_drain(4, 8).recompute(microbatches=range(7))
    again = [0.95 * x for x in forwards]
    costs = Costs(F=forwards, R=again, I=[0, *halves[1:]], W=halves, copy=0.3)
    yield "four_devices", simulate(schedule, costs).timeline
    # Partitions that are nearly alike.
    times = [1 + k * 3 % 8 / 40 for k in range(8)]
    costs = Costs(F=times, I=times, W=times, copy=0.1)
    yield "eight_devices", simulate(one_f_one_b(8, 32), costs).timeline


def on_devices(timeline: Timeline) -> Timeline:
    """The timeline of devices instead of workers, as a trace has it."""
    spans = [
        replace(x, stream=Stream(str(x.stream.device).replace("worker ", "cuda:"), x.stream.number))
        for x in timeline.spans
    ]
    return replace(timeline, spans=spans, unit="ms")


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    for name, timeline in pictures():
        on_devices(timeline).svg(folder / f"{name}.svg")


if __name__ == "__main__":
    draw(FOLDER)
