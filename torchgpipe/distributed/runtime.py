"""The runtime: PyTorch says when to send and to receive, and our workers compute.

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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torchgpipe._torch import pipelining
from torchgpipe.devices.streams import CPU
from torchgpipe.distributed.mail import Mail
from torchgpipe.executor.plan import again_in
from torchgpipe.schedule.exchange import write_csv
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, together
from torchgpipe.schedule.rewrite import without_recomputation

__all__: list[str] = []

#: What to do (compute, send or receive), and what with.
Action: TypeAlias = tuple[str, Sequence[Op]]

#: How many computations a receive is moved up.
AHEAD = 3


class Runtime:
    """The actions of one process for steps of one number of micro-batches.

    Args:
        schedule: the schedule, with an R for each cell that is computed under checkpointing.
        mail: the messages of this process.
        recorded: whether backward runs.
    """

    def __init__(self, schedule: Schedule, mail: Mail, recorded: bool) -> None:
        self._mail = mail
        self._again = again_in(schedule)
        found = actions(schedule, mail)
        if not recorded:
            # PyTorch lowers no schedule without a backward for each forward.
            forward = [(does, [op for op in ops if op.kind == "F"]) for does, ops in found]
            found = [(does, ops) for does, ops in forward if ops]
        #: What to call, in order.
        self._actions = [self._bound(does, ops) for does, ops in found]
        #: The same for steps whose messages have forms that both ends know before.
        self._actions_if_known = self._actions
        placement = mail.routes.placement
        # Messages of several stages would overtake each other.
        if mail.device == CPU and len({*placement}) == len(placement):
            self._actions_if_known = [self._bound(does, ops) for does, ops in earlier(found)]

    def run(self) -> None:
        """Go through the actions of a step."""
        # Receiving the first of its form waits for the sender.
        for action in self._actions_if_known if self._mail.forms_are_known else self._actions:
            action()
        self._mail.wait_for_sent()

    def _bound(self, does: str, ops: Sequence[Op]) -> Callable[[], None]:
        """The call that carries out an action in each step."""
        mail = self._mail
        if does == "compute":
            return self._computing(ops)
        (op,) = ops
        forward = op.kind == "F"
        if does == "send":
            send = mail.send_forward if forward else mail.send_backward
            return partial(send, op.stage, op.microbatch)
        receive = mail.receive_forward if forward else mail.receive_backward
        return partial(receive, op.stage, op.microbatch)

    def _computing(self, ops: Sequence[Op]) -> Callable[[], None]:
        """Compute instructions, after what they need of other processes has arrived."""
        mail, routes = self._mail, self._mail.routes
        # These run before the wait for the gradient, which is still on its way then.
        again = [
            op._replace(kind="R")
            for op in ops
            if op.kind in "BI" and (op.stage, op.microbatch) in self._again
        ]
        arriving: list[Callable[[], None]] = []
        for j, kind, i in ops:
            if kind == "F" and routes.is_away(j - 1):
                arriving.append(partial(mail.arrived, j, i))
            elif kind in "BI" and routes.is_away(j + 1):
                arriving.append(partial(mail.grads_arrived, j, i))
        instruction = together([*ops])

        def compute() -> None:
            for op in again:
                mail.worker.perform(0, op)
            for arrive in arriving:
                arrive()
            mail.worker.perform(0, instruction)

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


def actions(schedule: Schedule, mail: Mail) -> list[Action]:
    """The actions of this process, as PyTorch lowers a schedule, which it reads from a file."""
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "schedule.csv")
    try:
        program = without_recomputation(schedule.program)
        write_csv(replace(schedule, program=program), path)
        count, own = len(mail.routes.placement), mail.routes.own
        group = mail.peers.group
        found = pipelining.lowered(path, own, count, schedule.chunks, mail.device, group)
        pairs = [pipelining.read(action) for action in found]
        return [(does, [Op(*part) for part in parts]) for does, parts in pairs]
    finally:
        os.remove(path)
        os.rmdir(folder)
