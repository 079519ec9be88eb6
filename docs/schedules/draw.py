"""Draw the pictures of docs/schedule.rst: ``python docs/schedules/draw.py``."""

from collections.abc import Iterator
from pathlib import Path

from torchgpipe import schedule
from torchgpipe.schedule import Costs, Schedule, simulate

FOLDER = Path(__file__).parent

#: The schedules to draw, with four workers and eight micro-batches.
NAMES = (
    *("fill_drain", "one_f_one_b", "interleaved", "looped_bfs"),
    *("zero_bubble_h1", "zero_bubble_h2", "interleaved_zero_bubble"),
    *("zero_bubble_v", "v_half", "v_min", "dualpipe_v", "wave"),
)


def pictures() -> Iterator[tuple[str, Schedule]]:
    """Yield the name of each picture, and its schedule."""
    for name in NAMES:
        yield name, schedule.named(name, workers=4, chunks=8)
    yield "recompute", schedule.fill_drain(4, 4).recompute(microbatches=range(3))


def draw(folder: Path) -> None:
    """Write all pictures into a folder; one unit of time is F of all stages of a worker."""
    for name, drawn in pictures():
        part = len(drawn.program) / len(drawn.placement)
        report = simulate(drawn, Costs(F=part, I=part, W=part, R=part))
        report.svg(folder / f"{name}.svg", scale=38)


if __name__ == "__main__":
    draw(FOLDER)
