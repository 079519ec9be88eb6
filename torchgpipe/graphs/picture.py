"""Pictures of a stage's graph: what each of its parts computes, and what one hands to the next.

One column, or one table, is one part: F, then I and W, or B. Values have names by their roles, such
as ``saved[3]``, which is the fourth value that F keeps for the backward.

In the picture, a line that stays within a column is thin. A line to another column is what takes
memory between two instructions of a schedule. It is thick, has the color of the part that made its
value, and runs between the boxes of a column that it passes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from os import PathLike
from statistics import median_low
from textwrap import indent
from typing import Any

from torch import Tensor
from torch.fx import Node

from torchgpipe._torch.attributes import schema_of
from torchgpipe.checks import checked_path
from torchgpipe.graphs.joint import tensors_of
from torchgpipe.graphs.parts import Part, Parts
from torchgpipe.show import bars
from torchgpipe.show.tables import aligned, in_bytes

__all__ = ["text", "write_svg"]

#: The name of each part, and its colors on white and on black: lines, and boxes. Source: Okabe and
#: Ito, Color Universal Design, whose colors people tell apart who do not see all colors.
_KINDS = {
    "F": ("forward", ("#0072b2", "#d6eaf5"), ("#56b4e9", "#0b3350")),
    "B": ("backward", ("#d55e00", "#f8ddc9"), ("#f08a45", "#552600")),
    "I": ("backward for the input", ("#e69f00", "#fbe9c3"), ("#e69f00", "#4d3600")),
    "W": ("backward for the weights", ("#009e73", "#cdeee2"), ("#2fc79b", "#00402f")),
}


def text(parts: Parts, split: bool = True, stage: int | None = None) -> str:
    """Write a table for each part: first what it is given, then its operators.

    ``state[k]`` is a parameter or buffer, ``input[k]`` comes from the stage before, ``more[k]`` is
    an argument of the loss, and ``tangent[k]`` is the gradient of an output. ``saved[k]`` comes
    from F, and ``live[k]`` from I. What a part hands on is marked with the name that it has there.

    Args:
        parts: the parts of the stage.
        split: whether the backward is I and W; otherwise it is B.
        stage: the number of the stage, for the title.
    """
    lines = [_title(parts, split, stage)]
    first = _names(parts.forward)
    for kind, part in _parts(parts, split):
        names, marks = _names(part), _marks(parts, kind)
        rows = []
        for node in [*names, *part.slice.nodes]:
            name = names.get(node, node.name)
            call = [_operator(node), _arguments(node, names)]
            if node in names:
                maker = {"saved": "from F", "live": "from I"}.get(name.partition("[")[0], "")
                call = [maker, first.get(node, node.name) if maker else ""]
            rows.append([name, call[0], _result(node), ", ".join(marks.get(node, ())), call[1]])
        lines += ["", f"{kind}, {_KINDS[kind][0]}: {_summary(parts, part)}"]
        lines += [indent(aligned(rows, left=range(5)), "  ")] if rows else []
    return "\n".join(lines)


def _parts(parts: Parts, split: bool) -> list[tuple[str, Part]]:
    found = [("F", parts.forward)]
    return found + ([("I", parts.input), ("W", parts.weight)] if split else [("B", parts.backward)])


def _title(parts: Parts, split: bool, stage: int | None) -> str:
    count = sum(len(part.slice.nodes) for _, part in _parts(parts, split))
    name = "a stage" if stage is None else f"stage {stage}"
    late = f", {in_bytes(parts.bytes_of(parts.weight.slice.inputs))} kept for W" if split else ""
    return f"{name}: {_count(count)}, {in_bytes(parts.bytes_of(parts.saved))} saved from F{late}"


def _summary(parts: Parts, part: Part) -> str:
    size = in_bytes(parts.bytes_of([x for x in part.slice.outputs if x is not None]))
    return f"{_count(len(part.slice.nodes))}, hands on {size}"


def _count(number: int) -> str:
    return f"{number or 'no'} operator{'' if number == 1 else 's'}"


def _names(part: Part) -> dict[Node, str]:
    """The names of what a part is given, by roles."""
    given = sorted(zip(part.sources, part.slice.inputs), key=lambda x: x[0])
    return {node: f"{role}[{k}]" for (role, k), node in given}


def _marks(parts: Parts, kind: str) -> dict[Node, list[str]]:
    """The names that values of a part have elsewhere, and the buffers that operators change."""
    joint = parts.joint
    live = parts.input.slice.outputs[len(joint.input_grads) :] if kind == "I" else []
    groups: list[tuple[str, str, Sequence[Node | None]]] = [
        *[("F", "output", joint.outputs), ("F", "saved", parts.saved)],
        *[("BI", "input_grad", joint.input_grads), ("I", "live", live)],
        ("BW", "weight_grad", joint.weight_grads),
    ]
    found: dict[Node, list[str]] = {}
    for name, nodes in [(name, nodes) for kinds, name, nodes in groups if kind in kinds]:
        for k, node in enumerate(nodes):
            if node is not None:
                found.setdefault(node, []).append(f"{name}[{k}]")
    for k in parts.changed if kind == "F" else ():
        for node, written in parts.effects.written.items():
            if written & parts.effects.memory[joint.state[k]]:
                found.setdefault(node, []).append(f"changes state[{k}]")
    return found


def _operator(node: Node) -> str:
    """The name of an operator, without its overload, and without PyTorch's own namespace."""
    schema = schema_of(node.target)
    if schema is not None:
        return str(schema.name).removeprefix("aten::")
    return "constant" if node.op == "get_attr" else getattr(node.target, "__name__", node.name)


def _result(node: Node) -> str:
    """The shapes of the values of a node, and their dtypes."""
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors_of(node))
    return " ".join([", ".join(_shapes(node)), *dtypes])


def _shapes(node: Node) -> list[str]:
    value = node.meta.get("val")
    found = value if isinstance(value, tuple | list) else [value]
    shapes = ["x".join(map(str, x.shape)) if isinstance(x, Tensor) else "-" for x in found]
    return [x or "scalar" for x in shapes]


def _arguments(node: Node, names: Mapping[Node, str]) -> str:
    named = [f"{key}={_word(value, names)}" for key, value in node.kwargs.items()]
    return ", ".join([*[_word(x, names) for x in node.args], *named])


def _word(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, list | tuple):
        return f"[{', '.join([_word(x, names) for x in value])}]"
    return str(value).removeprefix("torch.")


#: Pixels: an operator, a view, the space between two boxes, a character of either, the distance of
#: two lines, and the least width of a column. The longest name in a box, in characters.
_TALL, _THIN, _GAP, _CHAR, _SMALL, _LANE, _LEAST, _LONGEST = 22, 13, 9, 6.1, 5.2, 6, 210, 30
_SHAPES = """\
rect:not(.page){rx:3px}text{font:11px sans-serif}.title{font-size:13px;font-weight:bold}
.end{text-anchor:end}.name{font:10px monospace}.small{font-size:8.5px}.line,.halo{fill:none}
.halo{stroke-width:4}.result{stroke-width:2.5}.cross .line{stroke-width:2.2}
.net:hover .line{stroke-width:4.5}"""


def write_svg(
    path: str | PathLike[str], parts: Parts, split: bool = True, stage: int | None = None
) -> None:
    """Draw the parts into an SVG file: a column for each, and a box for each operator.

    The tooltip of a box has the operator with its arguments. The lines of a value become thicker
    below the mouse.

    Args:
        path: the file.
        parts: the parts of the stage.
        split: whether the backward is I and W; otherwise it is B.
        stage: the number of the stage, for the title.
    """
    checked_path(path).write_text(_svg(parts, split, stage), encoding="utf-8")


@dataclass(eq=False)
class _Box:
    """One value in the picture: of an operator, or given from elsewhere."""

    node: Node
    column: int
    #: The CSS class: ``operator``, ``view`` or ``given``.
    kind: str
    label: str
    tip: str
    top: float

    def __post_init__(self) -> None:
        first, *rest = [*_shapes(self.node), ""]
        self.shape = f"{first}, …" if len(rest) > 1 else first
        self.height = _TALL if self.kind == "operator" else _THIN
        self.bottom = self.top + self.height
        char = _CHAR if self.kind == "operator" else _SMALL
        self.width = char * len(f"{self.label}  {self.shape}") + 20
        #: The lines that meet the left edge, from above.
        self.ports: list[_Wire] = []

    def takes(self, source: _Box) -> bool:
        """Whether the operator takes a value."""
        return self.kind != "given" and source.node in self.node.all_input_nodes


@dataclass(eq=False)
class _Wire:
    """All lines of one value in a channel, which is the space on the left of a column."""

    source: _Box
    channel: int
    #: The boxes of the column that take the value.
    targets: list[_Box]

    def __post_init__(self) -> None:
        #: Whether it comes from another column.
        self.crosses = self.source.column < self.channel
        #: The height at which it comes from there.
        self.begin = self.source.top + self.source.height / 2
        #: The height at which it goes on to the next channel, between boxes of the column.
        self.beyond: float | None = None
        #: The place of the vertical line, counted from the column.
        self.lane = 0

    def at(self, box: _Box) -> float:
        """The height at which a line of the value meets the left edge of a box."""
        return box.top + box.height * (box.ports.index(self) + 1) / (len(box.ports) + 1)

    @property
    def heights(self) -> list[float]:
        """The heights of the ends of the lines: first where they begin, last where they go on."""
        begin = self.begin if self.crosses else self.at(self.source)
        return [begin, *map(self.at, self.targets), *([] if self.beyond is None else [self.beyond])]


def _svg(parts: Parts, split: bool, stage: int | None) -> str:
    columns = _parts(parts, split)
    boxes = _boxes(parts, columns)
    wires = _wires(boxes)
    lefts, right = list[float](), 0.0
    for c, column in enumerate(boxes):
        count = _set_lanes([x for x in wires if x.channel == c])
        lefts.append(right + _LANE * count + (32 if count else 12))
        width = max([_LEAST, *[x.width for x in column]])
        right = lefts[-1] + width
        for box in column:
            box.width = width if box.kind == "operator" else box.width
    body = [bars.text(12, 20, _title(parts, split, stage), kind="title")]
    for wire in sorted(wires, key=lambda x: x.crosses):
        body += _lines(wire, columns[wire.source.column][0], lefts)
    for (kind, part), column, x in zip(columns, boxes, lefts):
        body.append(bars.text(x, 46, f"{kind}  {_KINDS[kind][0]}", kind="title"))
        body.append(bars.text(x, 61, _summary(parts, part)))
        for above, box in pairwise(column):
            if box.takes(above):
                body.append(f'<path class="line" d="M{x + 30:.1f} {above.bottom}V{box.top}"/>')
        for box in column:
            body += _drawn(box, kind, x, parts)
    ends = [x.bottom for column in boxes for x in column] + [y for x in wires for y in x.heights]
    legend, bottom = _legend([kind for kind, _ in columns], right, max([80, *ends]) + 28)
    return bars.document(right + 12, bottom + 14, _scheme(0), _scheme(1), [*body, *legend])


def _boxes(parts: Parts, columns: Sequence[tuple[str, Part]]) -> list[list[_Box]]:
    """The boxes of each column, from above: what the stage is given, then the operators."""
    found: list[list[_Box]] = []
    for c, (letter, part) in enumerate(columns):
        column: list[_Box] = []
        known = {box.node for some in found for box in some}
        names, marks = _names(part), _marks(parts, letter)
        for node in [*names, *part.slice.nodes]:
            label, kind = names.get(node, node.name), "operator"
            tip = f"{label} = {_operator(node)}({_arguments(node, names)}): {_result(node)}"
            if node in names:
                kind, tip = "given", f"{label}: {_result(node)}"
                if node in known or not label.startswith(("input", "more", "tangent")):
                    continue
            elif _is_light(parts, node):
                kind = "view"
            tip = "\n".join([tip, *marks.get(node, ())])
            label = label if len(label) <= _LONGEST else f"{label[: _LONGEST - 1]}…"
            top = column[-1].bottom + _GAP if column else 78
            column.append(_Box(node, c, kind, label, tip, top))
        found.append(column)
    return found


def _is_light(parts: Parts, node: Node) -> bool:
    """Whether a node returns memory of its arguments, and changes nothing."""
    memory, effects = parts.effects.memory[node], parts.effects
    taken = [effects.memory[x] for x in node.all_input_nodes]
    return bool(memory) and memory <= frozenset().union(*taken) and node not in effects.written


def _wires(boxes: Sequence[list[_Box]]) -> list[_Wire]:
    """Find the lines from each box to the boxes that take its value, in each channel."""
    every = [box for column in boxes for box in column]
    # A straight line between two neighbours will do.
    near = {(above, box) for column in boxes for above, box in pairwise(column)}
    wires = []
    for source in every:
        takers = [x for x in every if x.takes(source) and (source, x) not in near]
        for c in range(source.column, max([x.column for x in takers], default=-1) + 1):
            targets = [x for x in takers if x.column == c]
            if targets or c > source.column:
                wires.append(_Wire(source, c, targets))
    for wire in wires:
        for box in [*wire.targets, *([] if wire.crosses else [wire.source])]:
            box.ports.append(wire)
    for box in every:
        box.ports.sort(key=lambda x: (x.source is box, x.source.top))
    used: set[float] = set()
    for wire, after in pairwise(wires):
        if wire.crosses and after.source is wire.source:
            goal = median_low([after.at(x) for x in after.targets])
            after.begin = wire.beyond = _way(boxes[wire.channel], goal, used)
            used.add(wire.beyond)
    return wires


def _way(column: Sequence[_Box], goal: float, used: Collection[float]) -> float:
    """A height near another one at which a line passes a column between its boxes."""
    if not column or goal > column[-1].bottom + 5:
        return goal
    ways = [box.top - distance for box in column for distance in (3, 6)]
    ways += [column[-1].bottom + 5 + 4 * k for k in range(len(used) + 1)]
    return min([y for y in ways if y not in used], key=lambda y: abs(y - goal))


def _set_lanes(wires: Sequence[_Wire]) -> int:
    """Choose the vertical line of each value in a channel; return how many there are."""
    lanes: list[list[tuple[float, float]]] = []
    for crosses in (False, True):
        first = len(lanes)
        spans = [(max(x.heights) - min(x.heights), x) for x in wires if x.crosses == crosses]
        for _, wire in sorted(spans, key=lambda x: x[0]):
            a, b = min(wire.heights) - 5, max(wire.heights) + 5
            free = (k for k in range(first, len(lanes)) if all(d < a or b < c for c, d in lanes[k]))
            wire.lane = next(free, len(lanes))
            if wire.lane == len(lanes):
                lanes.append([])
            lanes[wire.lane].append((a, b))
    return len(lanes)


def _lines(wire: _Wire, kind: str, lefts: Sequence[float]) -> list[str]:
    """All lines of a value in a channel, with a head where a box takes it."""
    right = lefts[wire.channel]
    lane = right - 14 - _LANE * wire.lane
    start = lefts[wire.channel - 1] if wire.crosses else right
    if wire.crosses and wire.channel == wire.source.column + 1:
        start += wire.source.width
    begin, *ends = wire.heights
    paths = [_route(start, begin, lane, y, right) for y in ends]
    heads = [f"M{right:.1f} {y:.1f}l-6 -3v6z" for y in ends[: len(wire.targets)]]
    color = f" {kind}" if wire.source.kind != "given" or kind == "F" else ""
    return [
        f'<g class="net{f" cross{color}" if wire.crosses else ""}">',
        f"<title>{escape(wire.source.label)}</title>",
        *[f'<path class="{x}" d="{"".join(paths)}"/>' for x in ("halo", "line")],
        f'<path class="head" d="{"".join(heads)}"/></g>',
    ]


def _route(start: float, begin: float, lane: float, end: float, right: float) -> str:
    """A path along a vertical line, with round corners."""
    r = min(4, abs(end - begin) / 2)
    side, down = (r if start < lane else -r), (r if begin < end else -r)
    path = f"M{start:.1f} {begin:.1f}H{lane - side:.1f}q{side:.1f} 0 {side:.1f} {down:.1f}"
    return f"{path}V{end - down:.1f}q0 {down:.1f} {r:.1f} {down:.1f}H{right:.1f}"


def _drawn(box: _Box, kind: str, x: float, parts: Parts) -> list[str]:
    """Write a box as SVG, with the name and the shape of its value."""
    y, small = (box.bottom - 7, "") if box.kind == "operator" else (box.bottom - 3.5, " small")
    result = " result" if box.node in parts.joint.results else ""
    found = [
        bars.rect(x, box.top, box.width, box.height, f"{box.kind} {kind}{result}", tip=box.tip),
        bars.text(x + 8, y, box.label, kind=f"name{small}"),
        bars.text(x + box.width - 8, y, box.shape, kind=f"name end{small}"),
    ]
    if {*parts.joint.state} & {*box.node.all_input_nodes}:
        found.append(bars.rect(x + box.width - 6, box.top + 2, 4, 4, "state"))
    return found


def _legend(kinds: Sequence[str], width: float, y: float) -> tuple[list[str], float]:
    """Tell what boxes and lines mean, in some rows; return the height of the last one, too."""
    line, result = '<path class="line" d="M0 -4h26"/>', f"operator {kinds[-1]} result"
    samples = {
        "input, or gradient of an output": bars.rect(0, -8, 26, 8, "given"),
        "view, or one of several results": bars.rect(0, -8, 26, 8, "view F"),
        "output, or gradient of input or weight": bars.rect(0, -11, 26, 14, result),
        "takes parameters or buffers": bars.rect(11, -6, 4, 4, "state"),
        "within a part": line,
        "saved from F": f'<g class="net cross F">{line}</g>',
        "live from I to W": f'<g class="net cross I">{line}</g>',
    }
    found, x = [], 12.0
    for words, sample in [*samples.items()][: None if "I" in kinds else -1]:
        if x > 12 and x + 36 + 6.6 * len(words) > width:
            x, y = 12, y + 20
        place = f'transform="translate({x:.1f} {y:.1f})"'
        found.append(f"<g {place}>{sample}{bars.text(32, 0, words)}</g>")
        x += 52 + 6.6 * len(words)
    return found, y


def _scheme(dark: int) -> str:
    """The style: all of it for white, and the colors for black."""
    back, ink, line = [("white", "#111", "#777"), ("#14181f", "#eee", "#999")][dark]
    rules = [] if dark else [_SHAPES]
    rules += [f".page{{fill:{back}}}.halo{{stroke:{back}}}text{{fill:{ink}}}.line{{stroke:{line}}}"]
    rules += [f".head,.state{{fill:{line}}}.given{{fill:{back};stroke:{line}}}"]
    for kind, (_, *colors) in _KINDS.items():
        strong, weak = colors[dark]
        rules += [f".operator.{kind},.view.{kind}{{fill:{weak};stroke:{strong}}}"]
        rules += [f".net.{kind} .line{{stroke:{strong}}}.net.{kind} .head{{fill:{strong}}}"]
    return "\n".join(rules)
