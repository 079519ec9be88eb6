"""Draw the pictures of docs/see.rst: ``python docs/timelines/draw.py``."""

from pathlib import Path

from torchgpipe.schedule import Costs, named, simulate

FOLDER = Path(__file__).parent


def draw(folder: Path) -> None:
    """Write all pictures into a folder."""
    # The second partition takes half as long again as the others, and then no longer does.
    uneven = Costs(F=(2, 3, 2, 2), I=(0, 3, 2, 2), W=(4, 3, 2, 2), copy=0.5)
    even = Costs(F=2.25, I=(0, 2.25, 2.25, 2.25), W=(4.5, 2.25, 2.25, 2.25), copy=0.5)
    before, after = (simulate(named("1f1b", 4, 8), costs).timeline for costs in (uneven, even))
    before.svg(folder / "balance.svg", after)
    large = named("1f1b", 8, 32).recompute(microbatches=range(31))
    simulate(large, Costs(copy=0.2)).timeline.svg(folder / "large.svg")


if __name__ == "__main__":
    draw(FOLDER)
