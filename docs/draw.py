"""Draw the pictures of the pages, which ``make docs`` calls: ``python docs/draw.py``."""

from pathlib import Path

from torchgpipe import schedule
from torchgpipe.schedule import Costs, Schedule, named, simulate

#: The schedules to draw, with four workers and eight micro-batches.
NAMES = (
    *("fill_drain", "one_f_one_b", "interleaved", "looped_bfs"),
    *("zero_bubble_h1", "zero_bubble_h2", "interleaved_zero_bubble"),
    *("zero_bubble_v", "v_half", "v_min", "dualpipe_v", "wave"),
)


def schedules(folder: Path) -> None:
    """Draw the built-in schedules; one unit of time is F of all stages of a worker."""
    drawn: dict[str, Schedule] = {name: named(name, workers=4, chunks=8) for name in NAMES}
    drawn["recompute"] = schedule.fill_drain(4, 4).recompute(microbatches=range(3))
    for name, each in drawn.items():
        part = len(each.program) / len(each.placement)
        report = simulate(each, Costs(F=part, I=part, W=part, R=part))
        report.timeline.svg(folder / f"{name}.svg", scale=38)


def timelines(folder: Path) -> None:
    """Draw a step before and after the balance is mended, and a large one."""
    # The second partition takes half as long again as the others, and then no longer does.
    uneven = Costs(F=(2, 3, 2, 2), I=(0, 3, 2, 2), W=(4, 3, 2, 2), copy=0.5)
    even = Costs(F=2.25, I=(0, 2.25, 2.25, 2.25), W=(4.5, 2.25, 2.25, 2.25), copy=0.5)
    before, after = (simulate(named("1f1b", 4, 8), costs).timeline for costs in (uneven, even))
    before.svg(folder / "balance.svg", after)
    large = named("1f1b", 8, 32).recompute(microbatches=range(31))
    simulate(large, Costs(copy=0.2)).timeline.svg(folder / "large.svg")


def draw(folder: Path) -> None:
    """Write all pictures below a folder."""
    for each in (schedules, timelines):
        own = folder / each.__name__
        own.mkdir(exist_ok=True)
        each(own)


if __name__ == "__main__":
    draw(Path(__file__).parent)
