"""Pictures of results, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report.summary import Chart

#: Colours of rivals, the same in all pictures; other series take the remaining colours.
COLOURS = {
    "plain": "tab:gray",
    "baseline": "tab:gray",
    "ours": "tab:blue",
    "0.0.7": "tab:orange",
    "limit": "tab:green",
}
OTHERS = ("tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
STYLES = ("-", "--", ":")

#: Size of a chart in inches, and dots per inch.
WIDTH, HEIGHT, DOTS = 6.4, 4.0, 80


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts into a file, two side by side."""
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    for k, chart in enumerate(charts, start=1):
        draw_chart(figure.add_subplot(rows, columns, k), chart)
    # Leave the version of matplotlib out, so that the same result makes the same file.
    figure.savefig(path, dpi=DOTS, metadata={"Software": None})


def draw_chart(axes: Any, chart: Chart) -> None:
    """Draw lines, or groups of bars."""
    width = 0.8 / max(1, len(chart.series))
    others = iter(OTHERS * 2)
    for k, (name, values) in enumerate(chart.series.items()):
        points = [(x, value) for x, value in enumerate(values) if value is not None]
        places, heights = [x for x, _ in points], [value for _, value in points]
        colour = COLOURS.get(name) or next(others)
        if chart.lines:
            marker = "." if len(points) < 40 else None
            # Gaps in a line show the lines that it covers.
            style = STYLES[k * len(STYLES) // len(chart.series)]
            axes.plot(places, heights, style, marker=marker, color=colour, label=name)
        else:
            offset = (k - (len(chart.series) - 1) / 2) * width
            axes.bar([x + offset for x in places], heights, width, color=colour, label=name)
    if chart.limit is not None:
        axes.axhline(chart.limit, color="black", linestyle="--", linewidth=1)
    some = range(0, len(chart.labels), -(-len(chart.labels) // 12))
    long = max(map(len, chart.labels), default=0) > 8
    axes.set_xticks(
        some,
        [chart.labels[x] for x in some],
        rotation=30 if long else 0,
        ha="right" if long else "center",
    )
    axes.set_title(chart.title, fontsize="medium")
    axes.set_ylabel(chart.unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", framealpha=0.5)
