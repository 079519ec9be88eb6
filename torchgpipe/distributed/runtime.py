"""The runtime: PyTorch says when to send and to receive, and our executor computes.

:mod:`torch.distributed.pipelining` lowers a schedule: to what each process computes it adds when
each message is sent, and when its receiver begins to receive it. This file goes through the result.
PyTorch's own runtime would do so, too, and have its stages compute. But these find shapes, split
and differentiate by themselves, and are silently wrong where micro-batches differ in size, or where
weights depend on no input that requires a gradient. Stages of ours in their place were right, and
took more of the host (docs/decisions/across_processes.rst has the figure).
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import TypeAlias

from torchgpipe._torch import pipelining
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.mail import Mail
from torchgpipe.distributed.peers import Peers
from torchgpipe.distributed.routes import Routes
from torchgpipe.executor.executor import Executor
from torchgpipe.executor.plan import again_in
from torchgpipe.schedule.exchange import write_csv
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, together
from torchgpipe.schedule.rewrite import without_recomputation

__all__: list[str] = []

#: What to do (compute, send or receive), and what with.
Action: TypeAlias = tuple[str, Sequence[Op]]

#: What carries out an action in a step.
Call: TypeAlias = Callable[[Executor, Mail], None]

#: The messages, by what is done and what with.
MESSAGES = {
    ("send", "F"): Mail.send_forward,
    ("send", "B"): Mail.send_backward,
    ("receive", "F"): Mail.receive_forward,
    ("receive", "B"): Mail.receive_backward,
}

#: How many computations a receive is moved up.
AHEAD = 3


class Runtime:
    """The actions of one process for steps of one number of micro-batches.

    Args:
        schedule: the schedule, with an R for each cell that is computed under checkpointing.
        routes: in which process each stage is.
        peers: the processes of the pipeline.
        recorded: whether backward runs.
    """

    def __init__(self, schedule: Schedule, routes: Routes, peers: Peers, recorded: bool) -> None:
        again = again_in(schedule)
        found = actions(schedule, routes, peers)
        if not recorded:
            # PyTorch lowers no schedule without a backward for each forward.
            forward = [(does, [op for op in ops if op.kind == "F"]) for does, ops in found]
            found = [(does, ops) for does, ops in forward if ops]

        def calls(found: Sequence[Action]) -> list[Call]:
            return [
                _computing(ops, again, routes) if does == "compute" else _message(does, *ops)
                for does, ops in found
            ]

        #: What to call, in order.
        self._calls = calls(found)
        #: The same for steps whose messages have forms that both ends know before.
        self._calls_if_known = self._calls
        # Messages of several stages would overtake each other.
        if peers.device == CPU and len({*routes.placement}) == len(routes.placement):
            self._calls_if_known = calls(earlier(found))

    def run(self, executor: Executor, mail: Mail) -> None:
        """Go through the actions of a step."""
        # Receiving the first of its form waits for the sender.
        for call in self._calls_if_known if mail.forms.are_known else self._calls:
            call(executor, mail)
        mail.wait_for_sent()


def _message(does: str, op: Op) -> Call:
    """The call that begins to send or to receive a message."""
    method = MESSAGES[does, op.kind]
    return lambda executor, mail: method(mail, op.stage, op.microbatch)


def _computing(ops: Sequence[Op], again: Container[tuple[int, int]], routes: Routes) -> Call:
    """The call that computes instructions when what they need of other processes has arrived."""
    # These run before the wait for the gradient, which is still on its way then.
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
        for arrive, j, i in arriving:
            arrive(mail, j, i)
        executor.perform(0, instruction)

    return compute


def earlier(found: Sequence[Action]) -> list[Action]:
    """Move each receive up, past a few computations, and leave the order of receives.

    Under gloo, a message whose receiver is not ready takes turns of threads in both processes: the
    sender announces it, and a thread sends it once the receiver has answered. If the receiver is
    ready, the sender sends it at once.
    """
    before: defaultdict[int, list[Action]] = defaultdict(list)
    place: dict[Op, int] = {}
    number = least = 0
    for does, ops in found:
        if does == "compute":
            place.update(dict.fromkeys(ops, number))
            number += 1
        elif does == "receive":
            (op,) = ops
            # A gradient has the form of what it belongs to, which must have left.
            first = 0 if op.kind == "F" else place[op._replace(kind="F")] + 1
            least = max(least, first, number - AHEAD)
            before[least].append((does, ops))
    moved = []
    number = 0
    for does, ops in found:
        if does == "compute":
            moved += before[number]
            number += 1
        if does != "receive":
            moved.append((does, ops))
    return moved


def actions(schedule: Schedule, routes: Routes, peers: Peers) -> list[Action]:
    """The actions of this process, as PyTorch lowers a schedule, which it reads from a file."""
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "schedule.csv")
    try:
        program = without_recomputation(schedule.program)
        write_csv(replace(schedule, program=program), path)
        count, device, group = len(routes.placement), peers.device, peers.group
        found = pipelining.lowered(path, routes.own, count, schedule.chunks, device, group)
        pairs = [pipelining.read(action) for action in found]
        return [(does, [Op(*part) for part in parts]) for does, parts in pairs]
    finally:
        os.remove(path)
        os.rmdir(folder)
