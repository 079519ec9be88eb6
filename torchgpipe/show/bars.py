"""Pictures of bars in rows, with time from left to right, as SVG.

The colors differ for the color-blind, too (Okabe and Ito, Color universal design, 2008). Words and
lines take the colors of the page around them, light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import floor, log10
from typing import NamedTuple

from torchgpipe.checks import verify_number

__all__: list[str] = [
    "EDGES",
    "KINDS",
    "Bar",
    "Panel",
    "document",
    "rect",
    "svg",
    "text",
]


#: For each kind of bar, its color, and the words after the kind in the legend.
KINDS = {
    "F": ("#56b4e9", "forward"),
    "B": ("#e69f00", "backward"),
    "I": ("#009e73", "backward for the input"),
    "W": ("#f0e442", "backward for the weights"),
    "R": ("#b4b4b4", "recompute"),
    "copy": ("#cc79a7", ""),
    "out": ("#7f8cff", "to the host"),
    "back": ("#f07a4a", "from the host"),
}
#: For each kind that is drawn as a thin bar, the edge of the row: 1 is the lower one, 0 the upper.
EDGES = {"copy": 1, "out": 0, "back": 0}
#: In pixels: ``_BAR`` is the width of the average bar, ``_ROW`` the height of a row, ``_MARGIN``
#: the least width for the names of rows, ``_LINE`` the height of a line of text, ``_TICK`` the
#: least distance of ticks, and ``_COPY`` the height of a thin bar at an edge.
_BAR, _ROW, _MARGIN, _LINE, _TICK, _COPY = 26, 26, 66, 20, 100, 5
_LIGHT = """.page { fill: white } .words { fill: black } .waits { fill: #e8e8e8 }
.on-bar { fill: black } rect.bar { stroke: white; stroke-width: 0.5 }"""
_DARK = """.page { fill: #16181d } .words { fill: #e8e8e8 } .waits { fill: #33363d }
rect.bar { stroke: #16181d }"""
#: In pixels: ``_DIGIT`` is the width of a digit, and ``_WIDEST`` the greatest width of all bars of
#: a picture for which :func:`svg` chooses the scale.
_DIGIT, _WIDEST = 7, 2400


class Bar(NamedTuple):
    """A piece of work in a row.

    Args:
        start: when it began.
        end: when it ended.
        kind: one of :data:`KINDS`.
        label: a short text on it, left out if there is no room.
        tip: its tooltip.
        tone: a share of white in its color.
        part: which of several parts of the height it takes, and how many there are.
    """

    start: float
    end: float
    kind: str
    label: str = ""
    tip: str = ""
    tone: float = 0.0
    part: tuple[int, int] = (0, 1)


class Panel(NamedTuple):
    """Rows with a common time.

    Args:
        rows: the bars of each row, by its name.
        stop: the end of the time.
        title: a line above them.
        is_toned: whether some bars are lighter, for later stages of a worker.
    """

    rows: Mapping[str, Sequence[Bar]]
    stop: float
    title: str = ""
    is_toned: bool = False


def svg(panels: Sequence[Panel], scale: float | None = None) -> str:
    """Draw panels one below the other, on one scale: pixels per unit of time.

    Without a scale, one is chosen to fit the labels.
    """
    if scale is not None:
        rule = "scale must be the pixels of a unit of time"
        verify_number(scale, rule, "scale", "leave it out to fit the numbers", above=0)
    bars = [bar for panel in panels for row in panel.rows.values() for bar in row]
    stop = max([float(panel.stop) for panel in panels], default=0.0)
    margin = max([_MARGIN, *(8 + 7 * len(name) for panel in panels for name in panel.rows)])
    if not scale:
        # The average bar has room for a micro-batch's number, whatever the unit of time is.
        computed = [bar.end - bar.start for bar in bars if bar.kind not in EDGES]
        scale = _BAR * len(computed) / (float(sum(computed)) or 1) or 1.0
        scale = min(scale, _WIDEST / stop) if stop else scale
    body: list[str] = []
    y = 0.0
    for panel in panels:
        if panel.title:
            body.append(text(4, y + 14, panel.title, weight="bold"))
            y += _LINE
        body += _panel(panel, y, margin, scale)
        y += _LINE + len(panel.rows) * _ROW + 6
    legend, right = _legend(bars, margin, y + 10, any(panel.is_toned for panel in panels))
    body += legend
    words = '<g font-family="sans-serif" font-size="11">'
    return document(
        max(right, margin + stop * scale + 8), y + 20, _LIGHT, _DARK, [words, *body, "</g>"]
    )


def document(width: float, height: float, light: str, dark: str, body: Sequence[str]) -> str:
    """Write a whole picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}">'
    style = ["<style>", light, f"@media (prefers-color-scheme: dark) {{\n{dark} }}", "</style>"]
    page = '<rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, *style, page, *body, "</svg>\n"])


def _panel(panel: Panel, top: float, margin: float, scale: float) -> list[str]:
    stop = float(panel.stop)
    body: list[str] = []
    for k, (name, bars) in enumerate(panel.rows.items()):
        y = top + _LINE + k * _ROW
        body += [text(4, y + 17, name), rect(margin, y + 1, stop * scale, _ROW - 2, "waits")]
        for bar in bars:
            x, width = margin + float(bar.start) * scale, float(bar.end - bar.start) * scale
            color = lighter(KINDS[bar.kind][0], bar.tone)
            if bar.kind in EDGES:
                edge = y + 1 + EDGES[bar.kind] * (_ROW - 2 - _COPY)
                body.append(rect(x, edge, width, _COPY, "bar", color, bar.tip))
                continue
            number, of = bar.part
            height = (_ROW - 2) / of
            body.append(rect(x, y + 1 + number * height, width, height, "bar", color, bar.tip))
            if width >= _DIGIT * len(bar.label):
                middle = y + 1 + (number + 0.5) * height + 4
                body.append(text(x + width / 2, middle, bar.label, "middle", "on-bar"))
    step = _step(_TICK / scale)
    ticks = [k * step for k in range(int(stop / step) + 1)]
    above = top + 14
    body += [text(margin + t * scale, above, f"{t:g}") for t in ticks if stop - t >= step / 2]
    body.append(text(margin + stop * scale, above, f"{stop:.6g}", "end"))
    return body


def _legend(
    bars: Sequence[Bar], margin: float, y: float, is_toned: bool
) -> tuple[list[str], float]:
    """Return the legend, and where it ends on the right."""
    body: list[str] = []
    right: float = margin
    for kind, (color, name) in KINDS.items():
        if any(bar.kind == kind for bar in bars):
            words = f"{kind} {name}".rstrip()
            body += [rect(right, y - 10, 12, 12, "bar", color), text(right + 16, y, words)]
            right += 32 + 6 * len(words)
    body += [rect(right, y - 10, 12, 12, "waits"), text(right + 16, y, "waits")]
    right += 62
    if is_toned:
        body.append(text(right, y, "lighter: later stages of a worker"))
        right += 200
    return body, right


def _step(least: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** floor(log10(least))
    return next(x * power for x in (1, 2, 5, 10) if x * power >= least)


def text(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    kind: str = "words",
    weight: str = "normal",
) -> str:
    """Write words; ``kind`` is their class in the style."""
    bold = f' font-weight="{weight}"' if weight != "normal" else ""
    attributes = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{bold}'
    return f'<text class="{kind}" {attributes}>{escape(words)}</text>'


def rect(
    x: float, y: float, width: float, height: float, kind: str, color: str = "", tip: str = ""
) -> str:
    """Write a rectangle; ``kind`` is its class in the style, and ``tip`` its tooltip."""
    attributes = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    fill = f' fill="{color}"' if color else ""
    return f'<rect class="{kind}" {attributes}{fill}>{title}</rect>'


def lighter(color: str, share: float) -> str:
    """Mix a color with a share of white."""
    parts = (int(color[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)
