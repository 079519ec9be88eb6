"""Programs: what each worker computes, in order, and which computation needs which.

::

    0F0 ──> 1F0 ──> 2F0      2F0        forward of stage 2, micro-batch 0
     │       │       │       2B0        its backward, for its input and its weights
    0B0 <── 1B0 <── 2B0      2I0, 2W0   the two halves of 2B0: for the input, then for the weights
                             2R0        recomputation: the forward again, between F and B (or I)
                             (0F1;2B0)  two computations at once, on two streams of one device

A skip leads from a stage to a later one, and its gradient back. Then there is an edge between the F
of the two stages, and another one between their B or I.

A worker starts an instruction when its previous instruction has ended and every computation that
the instruction needs has ended. A copy between workers is not an instruction. It belongs to an edge
between two computations, so a copy never blocks a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import NamedTuple, TypeAlias

__all__ = [
    "Op",
    "Overlap",
    "by_stage",
    "needs",
    "operations",
    "operations_of",
    "together",
    "walk",
]


class Op(NamedTuple):
    """One computation: the stage, the kind (F, B, I, W or R) and the micro-batch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Overlap(NamedTuple):
    """Two computations of one worker that start and end together."""

    first: Op
    second: Op

    def __str__(self) -> str:
        return f"({self.first};{self.second})"


Instruction: TypeAlias = Op | Overlap
#: For each worker, its instructions in order.
Program: TypeAlias = tuple[tuple[Instruction, ...], ...]
#: A computation, and a computation that must wait for it.
Edge: TypeAlias = tuple[Op, Op]
#: For each skip, the stage that stashes and the stage that pops.
Skips: TypeAlias = Sequence[tuple[int, int]]
#: For each worker that waits: its next instruction, and a computation that this instruction needs.
Waiting: TypeAlias = dict[int, tuple[Instruction, Op]]


def operations(instruction: Instruction) -> tuple[Op, ...]:
    """Return the computations of an instruction: one, or the two of an overlap."""
    return instruction if isinstance(instruction, Overlap) else (instruction,)


def together(ops: Sequence[Op]) -> Instruction:
    """Return the instruction made of one or two computations: the inverse of :func:`operations`."""
    return Overlap(*ops) if len(ops) == 2 else ops[0]


def operations_of(program: Program) -> Iterator[Op]:
    """Yield all computations of a program, worker by worker."""
    return (op for line in program for instruction in line for op in operations(instruction))


def needs(op: Op, ops: Container[tuple[int, str, int]], skips: Skips = ()) -> list[Op]:
    """Return the computations that must end before ``op`` starts, as far as they are in ``ops``.

    This is the one model of what waits for what: of the validator, the simulator, the bounds, and
    of whatever runs a schedule.

    Args:
        op: a computation.
        ops: the computations of the program.
        skips: the stages that each skip leads from and to; those of other stages than the one of
            ``op`` may be left out.
    """
    j, kind, i = op
    if kind == "F":
        sources = [(j - 1, "F", i)]
    elif kind == "R":
        sources = [(j, "F", i)]
    elif kind == "W":
        sources = [(j, "I", i)]
    else:
        sources = [(j, "F", i), (j, "R", i), (j + 1, "B", i), (j + 1, "I", i)]
    if skips:
        if kind == "F":
            sources += [(k, "F", i) for k, target in skips if target == j]
        elif kind in "BI":
            sources += [(k, half, i) for source, k in skips if source == j for half in "BI"]
        # The value and skips, or their gradients, may come from one computation, which counts once.
        sources = list(dict.fromkeys(sources))
    return [Op(*x) for x in sources if x in ops]


def by_stage(skips: Skips) -> dict[int, list[tuple[int, int]]]:
    """Return the skips that begin or end at each stage, so that nobody looks through all of them.

    A model may have a skip for each stage. To look through them for each computation would then
    take longer with each stage.
    """
    near: dict[int, list[tuple[int, int]]] = {}
    for skip in skips:
        for stage in skip:
            near.setdefault(stage, []).append(skip)
    return near


def walk(
    program: Program, stuck: Callable[[Waiting], int | None], skips: Skips = ()
) -> Iterator[tuple[int, Instruction, list[Edge]]]:
    """Visit all instructions so that each comes after the computations that it needs.

    The order respects the edges, but it is not an order of time.

    Args:
        program: the instructions of each worker.
        stuck: called when all remaining workers wait. It returns the worker that shall go on
            without the computations that it needs, or None to end the walk.
        skips: the stages that each skip leads from and to.

    Yields:
        The worker, its next instruction, and the edges that lead to this instruction.
    """
    # Edges refer to the Op objects of the program, not to the equal ones that needs() makes. This
    # saves memory, since a search keeps many edges.
    ops = {op: op for op in operations_of(program)}
    near = by_stage(skips)
    done: set[Op] = set()
    waiting: Waiting = {}
    #: For each computation, the workers that wait for it.
    waiters: dict[Op, list[int]] = {}
    position = [0] * len(program)
    awake = [*range(len(program))]
    freed = None
    while awake:
        w = awake.pop()
        while position[w] < len(program[w]):
            instruction = program[w][position[w]]
            parts = operations(instruction)
            edges = [(ops[x], op) for op in parts for x in needs(op, ops, near.get(op.stage, ()))]
            missing = [x for x, _ in edges if x not in done]
            if missing and w != freed:
                waiting[w] = instruction, missing[0]
                waiters.setdefault(missing[0], []).append(w)
                break
            freed = None
            yield w, instruction, edges
            position[w] += 1
            done.update(parts)
            for op in parts:
                for x in waiters.pop(op, ()):
                    # stuck() may have let worker x go on without op. If x now waits for another
                    # computation, it goes on waiting.
                    if x in waiting and waiting[x][1] == op:
                        del waiting[x]
                        awake.append(x)
        freed = stuck(waiting) if waiting and not awake else None
        if freed is not None:
            del waiting[freed]
            awake = [freed]
