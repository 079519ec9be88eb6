"""Programs of processes: PyTorch says when to send and to receive, and our executor computes.

:mod:`torch.distributed.pipelining` lowers a schedule: to what each process computes it adds when
each message is sent, and when its receiver begins to receive it. This file goes through that::

    schedule ── lowered by PyTorch ──→ actions    made once, for each number of micro-batches
                                         │
       receive            Mail begins to receive a message, and goes on
       compute (+ send)   the message has arrived: the executor computes, and the results leave
       receive            ...

    compute = R, if due ─→ begin ─→ wait for what arrives ─→ carry_out ─→ send ─→ end

The first cell is computed while the processes are still settling that they take the same step, and
how it is divided. Where the form of a message is not known yet, as in the first step, Mail waits
for that before it goes on. What is sent right after a computation is a part of it, so that a
message leaves before the rest that nobody waits for.

PyTorch's own runtime would go through the actions, too, and have its stages compute. But these find
shapes, split and differentiate by themselves, and are silently wrong where micro-batches differ in
size, or where weights depend on no input that requires a gradient. Stages of ours in their place
were right, and took more of the host (docs/decisions/across_processes.rst has the figure).
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchgpipe._torch import pipelining
from torchgpipe.distributed.agreement import Agreed
from torchgpipe.distributed.mail import Mail
from torchgpipe.distributed.peers import Peers, Routes
from torchgpipe.engine.loop import Executor
from torchgpipe.engine.step_plan import Choice, StepPlan, chosen, completed
from torchgpipe.partition.keeping import Keepings, choosing, keepings_of, recomputed_by
from torchgpipe.schedule.language import Schedule, write_csv
from torchgpipe.schedule.program import Instruction, Op, operations, together
from torchgpipe.schedule.rewrite import without_recomputation
from torchgpipe.skip.tracker import SkipLayout

__all__: list[str] = []

#: ``Action``: what to do (compute, send or receive), and the operations that are computed, or the
#: one whose result travels. ``ActionCall``: a function that does it.
Action: TypeAlias = tuple[str, Sequence[Op]]
ActionCall: TypeAlias = Callable[[Executor, Mail], None]

#: The method of Mail for each thing to do (send or receive) and kind of message (F for the outputs
#: of a forward, B for gradients).
MESSAGES = {
    ("send", "F"): Mail.send_forward,
    ("send", "B"): Mail.send_backward,
    ("receive", "F"): Mail.receive_forward,
    ("receive", "B"): Mail.receive_backward,
}


class Actions:
    """The actions of one process, for all steps that have the same number of micro-batches."""

    def __init__(
        self,
        choice: Choice,
        layout: SkipLayout,
        routes: Routes,
        peers: Peers,
        m: int,
        recorded: bool,
        modes: Keepings,
    ) -> None:
        fits = fitting(choice, len(routes.placement), peers.size, m)
        keepings = keepings_of(modes if recorded else "never", len(routes.placement))
        words = tuple(map(recomputed_by, keepings))
        schedule = completed(fits, words, layout.pairs, forward=False)
        # The executor knows of no other process. It is told that one worker, this process, has all
        # stages, and it gets this process's line of the program alone.
        line = tuple(_late(schedule.program[routes.rank]))
        local = Schedule((0,) * len(routes.placement), m, (line,))
        names = [f"rank {routes.rank}"]
        self.plan = StepPlan(local, (peers.device,), (), names, choosing(keepings))
        todo = actions(schedule, routes, peers)
        if not recorded:
            # PyTorch only lowers schedules in which each forward has a backward, so the backwards
            # are dropped here.
            forward = [(does, [op for op in ops if op.kind == "F"]) for does, ops in todo]
            todo = [(does, ops) for does, ops in forward if ops]
        again = self.plan.again
        #: What this process computes before all agree on the step; None if a message comes first.
        self._first = together([*todo.pop(0)[1]]) if todo[0][0] == "compute" else None
        #: The functions that carry out all actions after ``_first``, in order.
        self._calls = [*_calls(todo, again, routes)]
        #: How many of ``_calls`` run before ``prepare``: 1 if the first of them sends or receives
        #: (as another process may be waiting for it), else 0.
        self._urgent = int(bool(todo) and todo[0][0] != "compute")

    def run(
        self,
        executor: Executor,
        mail: Mail,
        agree: Callable[[], Agreed],
        prepare: Callable[[], None],
    ) -> None:
        """Go through the actions of a step, after the first cell once all processes agree.

        Args:
            executor: computes.
            mail: sends and receives.
            agree: waits for the agreement of all processes.
            prepare: has to be called before any backward. By then this process most often waits
                for another one, so it takes no time.
        """
        first = [] if self._first is None else executor.begin(0, self._first)
        try:
            if first:
                executor.carry_out(0, first)
        except Exception:
            # guard: what is wrong in several processes
            agree()
            raise
        division, shapes, mail.with_numbers = agree()
        kinds = [*range(division.m)] if division.is_varied else division.sizes
        mail.forms.begin(shapes, kinds)
        for call in self._calls[: self._urgent]:
            call(executor, mail)
        if first:
            executor.end(0, first)
            # ``first`` holds the cell, which would otherwise outlive its backward.
            first.clear()
        prepare()
        mail.expect_the_end()
        for call in self._calls[self._urgent :]:
            call(executor, mail)
        mail.wait_for_sent()


def fitting(choice: Choice, stages: int, size: int, m: int) -> Schedule:
    """Make the schedule of steps.

    Raises:
        TypeError: the choice is no schedule.
        ValueError: the schedule does not fit.
    """
    schedule = chosen(choice, stages, [size], m)
    placement: Sequence[int] = schedule.placement
    if len(placement) != stages or len(schedule.program) != size or schedule.chunks != m:
        raise ValueError(
            "a schedule must fit the model and the group: as many stages as the balance has "
            "numbers, a worker for each process, and as many micro-batches "
            f"(workers of the stages: {[*placement]}, stages: {stages}, processes: {size}, "
            f"micro-batches of the schedule: {schedule.chunks}, of the mini-batch: {m}); give the "
            "balance a number for each stage, start as many processes as the schedule has workers, "
            "or choose another schedule"
        )
    return schedule


def _late(line: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions in the order in which they run here: each R right before its backward."""
    again = {(x.stage, x.microbatch) for y in line for x in operations(y) if x.kind == "R"}
    for instruction in line:
        ops = operations(instruction)
        for op in ops:
            if op.kind in "BI" and (op.stage, op.microbatch) in again:
                yield op._replace(kind="R")
        if rest := [op for op in ops if op.kind != "R"]:
            yield together(rest)


def _calls(
    todo: Sequence[Action], again: Container[tuple[int, int]], routes: Routes
) -> Iterator[ActionCall]:
    """The calls that carry out actions; what is sent right after a computation is a part of it."""
    rest = deque(todo)
    while rest:
        does, ops = rest.popleft()
        if does == "compute":
            sends = []
            while rest and rest[0][0] == "send":
                sends.append(_message(*rest.popleft()))
            yield _computation(ops, sends, again, routes)
        else:
            yield _message(does, ops)


def _message(does: str, ops: Sequence[Op]) -> ActionCall:
    (message,) = ops
    method = MESSAGES[does, message.kind]
    return lambda executor, mail: method(mail, message.stage, message.microbatch)


def _computation(
    ops: Sequence[Op],
    sends: Sequence[ActionCall],
    again: Container[tuple[int, int]],
    routes: Routes,
) -> ActionCall:
    """The call that computes when what it needs has arrived, and sends at once what comes of it."""
    # Recomputations run before this process waits for the gradient, which arrives meanwhile.
    first = [
        op._replace(kind="R")
        for op in ops
        if op.kind in "BI" and (op.stage, op.microbatch) in again
    ]
    arriving: list[tuple[Callable[[Mail, int, int], None], int, int]] = []
    for j, kind, i in ops:
        if kind == "F" and routes.is_away(j - 1):
            arriving.append((Mail.arrived, j, i))
        elif kind in "BI" and routes.is_away(j + 1):
            arriving.append((Mail.grads_arrived, j, i))
    instruction = together([*ops])

    def compute(executor: Executor, mail: Mail) -> None:
        for op in first:
            executor.perform(0, op)
        runs = executor.begin(0, instruction)
        for run in runs:
            run.prepare()
        for arrive, j, i in arriving:
            arrive(mail, j, i)
        executor.carry_out(0, runs)
        for send in sends:
            send(executor, mail)
        executor.end(0, runs)

    return compute


def actions(schedule: Schedule, routes: Routes, peers: Peers) -> list[Action]:
    """The actions of this process, as PyTorch lowers a schedule, which it reads from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "schedule.csv")
        program = without_recomputation(schedule.program)
        write_csv(replace(schedule, program=program), path)
        count, device, group = len(routes.placement), peers.device, peers.group
        lowered = pipelining.lowered(path, routes.stages, count, schedule.chunks, device, group)
        pairs = [pipelining.read(action) for action in lowered]
        return [(does, [Op(*part) for part in parts]) for does, parts in pairs]
