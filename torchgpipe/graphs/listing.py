"""Listings of a stage's graph: what each of its parts computes, and what one hands to the next.

A table is a part: F, then I and W, or B. Values have names by their roles, such as ``saved[3]``,
which is the fourth value that F keeps for the backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

from torch import Tensor
from torch.fx import Node

from torchgpipe._torch.attributes import schema_of
from torchgpipe.graphs.joint import fakes_of
from torchgpipe.graphs.parts import Part, Parts
from torchgpipe.show.tables import aligned, in_bytes

__all__: list[str] = []


def listing(parts: Parts, split: bool = True, stage: int | None = None) -> str:
    """Write a table for each part: first what it is given, then its operators.

    ``state[k]`` is a parameter or buffer, ``input[k]`` comes from the stage before, ``more[k]`` is
    an argument of the loss, and ``tangent[k]`` is the gradient of an output. ``saved[k]`` comes
    from F, and ``live[k]`` from I. What a part hands on is marked with the name that it has there.

    Args:
        parts: the parts of the stage.
        split: whether the backward is I and W; otherwise it is B.
        stage: the number of the stage, for the title.
    """
    tables: list[tuple[str, Part]] = [("F, forward", parts.forward)]
    if split:
        tables.append(("I, backward for the input", parts.input))
        tables.append(("W, backward for the weights", parts.weight))
    else:
        tables.append(("B, backward", parts.backward))
    name = "a stage" if stage is None else f"stage {stage}"
    count = _count(sum(len(part.slice.nodes) for _, part in tables))
    late = f", {in_bytes(parts.bytes_of(parts.weight.slice.inputs))} kept for W" if split else ""
    lines = [f"{name}: {count}, {in_bytes(parts.bytes_of(parts.saved))} saved from F{late}"]
    first = {node.name: name for node, name in _names(parts.forward).items()}
    for title, part in tables:
        names, marks = _names(part), _marks(parts, part, title[0])
        rows = []
        for node in [*names, *part.slice.nodes]:
            name = names.get(node, node.name)
            call = [_operator(node), _arguments(node, names)]
            if node in names:
                maker = {"saved": "from F", "live": "from I"}.get(name.partition("[")[0], "")
                call = [maker, first.get(node.name, node.name) if maker else ""]
            rows.append([name, call[0], _result(node), ", ".join(marks.get(node, ())), call[1]])
        size = in_bytes(parts.bytes_of([x for x in part.slice.outputs if x is not None]))
        lines += ["", f"{title}: {_count(len(part.slice.nodes))}, hands on {size}"]
        lines += [indent(aligned(rows, left=range(5)), "  ")] if rows else []
    return "\n".join(lines)


def _count(number: int) -> str:
    return f"{number or 'no'} operator{'' if number == 1 else 's'}"


def _names(part: Part) -> dict[Node, str]:
    """The names of what a part is given, by roles."""
    arguments = sorted(zip(part.sources, part.slice.inputs), key=lambda x: x[0])
    return {node: f"{role}[{k}]" for (role, k), node in arguments}


def _marks(parts: Parts, part: Part, kind: str) -> dict[Node, list[str]]:
    """The names that values of a part have elsewhere, and the buffers that operators change."""
    joint, marks = parts.joint, dict[Node, list[str]]()
    first, rest = {"F": ("output", "saved"), "I": ("input_grad", "live")}.get(
        kind, ("input_grad", "weight_grad")
    )
    count = {"F": len(joint.outputs), "W": 0}.get(kind, len(joint.input_grads))
    for k, node in enumerate(part.slice.outputs):
        if node is not None:
            name = f"{first}[{k}]" if k < count else f"{rest}[{k - count}]"
            marks.setdefault(node, []).append(name)
    for k in parts.changed if kind == "F" else ():
        for node, written in parts.effects.written.items():
            if written & parts.effects.memory[joint.state[k]]:
                marks.setdefault(node, []).append(f"changes state[{k}]")
    return marks


def _operator(node: Node) -> str:
    """The name of an operator, without its overload, and without PyTorch's own namespace."""
    schema = schema_of(node.target)
    if schema is not None:
        return str(schema.name).removeprefix("aten::")
    return "constant" if node.op == "get_attr" else getattr(node.target, "__name__", node.name)


def _result(node: Node) -> str:
    """The shapes of the values of a node, and their dtypes."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    shapes = ["x".join(map(str, x.shape)) if isinstance(x, Tensor) else "-" for x in values]
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in fakes_of(node))
    return " ".join([", ".join([x or "scalar" for x in shapes]), *dtypes])


def _arguments(node: Node, names: Mapping[Node, str]) -> str:
    named = [f"{key}={_word(value, names)}" for key, value in node.kwargs.items()]
    return ", ".join([*[_word(x, names) for x in node.args], *named])


def _word(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names.get(value, value.name)
    if isinstance(value, list | tuple):
        return f"[{', '.join([_word(x, names) for x in value])}]"
    return str(value).removeprefix("torch.")
