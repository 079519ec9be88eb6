"""Bars in rows, as SVG."""

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from torchgpipe.show.bars import KINDS, Bar, Panel, svg

SVG = "{http://www.w3.org/2000/svg}"


def rects(text):
    return [x for x in ElementTree.fromstring(text).iter(f"{SVG}rect") if x.get("class") == "bar"]


def test_panels_have_one_scale():
    panels = [
        Panel({"one": [Bar(0, 2, "F")]}, 2),
        Panel({"two": [Bar(0, 4, "B")]}, 4),
    ]
    first, second, *_ = rects(svg(panels))
    assert float(second.get("width")) == pytest.approx(2 * float(first.get("width")), abs=0.2)
    assert float(second.get("y")) > float(first.get("y"))


def test_labels_need_room():
    bars = [Bar(0, 10, "F", "12"), Bar(10, 10.1, "F", "13")]
    words = [x.text for x in ElementTree.fromstring(svg([Panel({"": bars}, 11)])).iter()]
    assert "12" in words
    assert "13" not in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_the_page(scheme):
    light, dark = svg([]).split("@media")
    style = light if scheme == "light" else dark
    fills = dict(re.findall(r"\.([\w-]+) { fill: (\S+) }", style))
    assert contrast(fills["page"], fills["words"]) > 7


def test_digits_can_be_read_on_bars():
    for color, _ in KINDS.values():
        assert contrast(color, "black") > 5


def test_kinds_differ_for_the_color_blind():
    # The matrices of Vienot, Brettel and Mollon (1999) for people without red, or green, cones.
    for matrix in (
        [[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]],
        [[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]],
    ):
        seen = {
            kind: [sum(m * x for m, x in zip(row, linear(color))) for row in matrix]
            for kind, (color, _) in KINDS.items()
        }
        for one, other in combinations(seen, 2):
            assert max(abs(x - y) for x, y in zip(seen[one], seen[other])) > 0.08, (one, other)


def linear(color):
    color = {"white": "#ffffff", "black": "#000000"}.get(color, color)
    parts = [int(color[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return [x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]


def contrast(one, other):
    weights = 0.2126, 0.7152, 0.0722
    dark, light = sorted(sum(w * x for w, x in zip(weights, linear(c))) for c in (one, other))
    return (light + 0.05) / (dark + 0.05)
