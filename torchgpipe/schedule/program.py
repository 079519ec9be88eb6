"""Programs: what each worker computes, in order, and the one model of what waits for what.

::

    0F0 ──> 1F0 ──> 2F0      2F0        forward of stage 2, micro-batch 0
     │       │       │       2B0        backward of it, for its input and its weights
    0B0 <── 1B0 <── 2B0      2I0, 2W0   the halves of that: the input's, and later the weights'
                             2R0        the forward again, between F and B (or I)
                             (0F1;2B0)  two at once, on the streams of one device

A worker begins an instruction when the one before and all that it needs have ended. A copy between
workers is no instruction: it belongs to an arrow, so that it can block nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple, TypeAlias

__all__ = ["Op", "Overlap", "needs", "operations", "operations_of", "timetable", "walk"]


class Op(NamedTuple):
    """One computation: of a stage, of a kind (F, B, I, W or R), of a micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """Two computations of one worker that begin and end together."""

    first: Op
    second: Op

    def __str__(self) -> str:
        return f"({self.first};{self.second})"


Instruction: TypeAlias = Op | Overlap
#: The instructions of each worker.
Program: TypeAlias = tuple[tuple[Instruction, ...], ...]
#: A computation, and one that needs it.
Edge: TypeAlias = tuple[Op, Op]
#: Of each worker that waits: the instruction it is at, and a computation that this needs.
Waiting: TypeAlias = dict[int, tuple[Instruction, Op]]


def operations(instruction: Instruction) -> tuple[Op, ...]:
    """The computations of an instruction: itself, or both of an overlap."""
    return instruction if isinstance(instruction, Overlap) else (instruction,)


def operations_of(program: Program) -> Iterator[Op]:
    """All computations of a program, worker after worker."""
    return (op for line in program for instruction in line for op in operations(instruction))


def needs(op: Op, ops: Container[tuple[int, str, int]]) -> list[Op]:
    """What must have ended before ``op`` begins, of the computations that there are (``ops``)."""
    j, kind, i = op
    if kind == "F":
        found = [(j - 1, "F", i)]
    elif kind == "R":
        found = [(j, "F", i)]
    elif kind == "W":
        found = [(j, "I", i)]
    else:
        found = [(j, "F", i), (j, "R", i), (j + 1, "B", i), (j + 1, "I", i)]
    return [Op(*x) for x in found if x in ops]


def walk(
    program: Program, stuck: Callable[[Waiting], int | None]
) -> Iterator[tuple[int, Instruction, list[Edge]]]:
    """Yields workers, their next instructions and the edges to these; no edge leads backwards.

    That is an order of dependencies, not of time. If all workers wait, ``stuck`` is told for what,
    and returns one that shall do without it, or None to end the walk.
    """
    ops = set(operations_of(program))
    done: set[Op] = set()
    waiting: Waiting = {}
    position = [0] * len(program)
    awake = [*range(len(program))]
    freed = None
    while awake:
        w = awake.pop()
        while position[w] < len(program[w]):
            instruction = program[w][position[w]]
            parts = operations(instruction)
            edges = [(x, op) for op in parts for x in needs(op, ops)]
            missing = [x for x, _ in edges if x not in done]
            if missing and w != freed:
                waiting[w] = instruction, missing[0]
                break
            freed = None
            yield w, instruction, edges
            position[w] += 1
            done.update(parts)
            for x in [x for x, (_, op) in waiting.items() if op in parts]:
                del waiting[x]
                awake.append(x)
        freed = stuck(waiting) if waiting and not awake else None
        if freed is not None:
            del waiting[freed]
            awake = [freed]


def timetable(
    program: Program, duration: Callable[[Instruction], float], delay: Callable[[Edge], float]
) -> tuple[dict[Op, float], dict[Op, float]]:
    """When each computation begins and ends, if ever. A delay is how long a copy takes."""
    free: list[float] = [0] * len(program)
    start: dict[Op, float] = {}
    end: dict[Op, float] = {}
    for w, instruction, edges in walk(program, stuck=lambda waiting: None):
        begin = max([free[w], *(end[edge[0]] + delay(edge) for edge in edges)])
        free[w] = begin + duration(instruction)
        for op in operations(instruction):
            start[op], end[op] = begin, free[w]
    return start, end
