"""The runtime: PyTorch orders instructions and messages, and our workers compute.

:mod:`torch.distributed.pipelining` lowers a schedule to one that says when to send and to receive,
and goes through it. It asks a stage for the operations of each message, and lets others compute in
its place. That is all that is used of it. Its own stages find shapes, split and differentiate by
themselves, and are silently wrong where micro-batches differ in size, or where weights depend on no
input that requires a gradient.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.pipelining import PipelineStage

from torchgpipe._torch import pipelining
from torchgpipe.distributed.mail import Mail
from torchgpipe.executor.plan import again_in
from torchgpipe.schedule.exchange import write_csv
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Op, together
from torchgpipe.schedule.rewrite import without_recomputation

__all__: list[str] = []


class Stage(PipelineStage):
    """A stage as PyTorch's runtime sees it: where its messages come from.

    Args:
        mail: the messages of this process.
        j: the stage.
    """

    def __init__(self, mail: Mail, j: int) -> None:
        count = len(mail.routes.placement)
        # The runtime has no use for the layers. With empty examples of tensors, it asks nobody for
        # their shapes.
        super().__init__(nn.Identity(), j, count, mail.device, (), (), group=mail.group)
        self._mail = mail

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._mail.receive_forward(self.stage_index, fwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        return self._mail.send_forward(self.stage_index, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward:
            return []
        return self._mail.receive_backward(self.stage_index, bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        if not self.has_backward:
            return []
        return self._mail.send_backward(self.stage_index, bwd_chunk_id)


class Runtime:
    """The instructions of one process for steps of one number of micro-batches.

    Args:
        schedule: the schedule, with an R for each cell that is computed under checkpointing.
        mail: the messages of this process.
        recorded: whether backward runs.
    """

    def __init__(self, schedule: Schedule, mail: Mail, recorded: bool) -> None:
        self._mail, self._recorded = mail, recorded
        self._again = again_in(schedule)
        stages = [Stage(mail, j) for j in mail.routes.own]
        self._runtime = pipelining.runtime(stages, schedule.chunks, recorded)
        for kind in pipelining.KINDS:
            self._runtime.register_custom_function(pipelining.kind(kind), self._perform)
        folder = tempfile.mkdtemp()
        path = os.path.join(folder, "schedule.csv")
        try:
            program = without_recomputation(schedule.program)
            write_csv(replace(schedule, program=program), path)
            pipelining.load(self._runtime, path)
        finally:
            os.remove(path)
            os.rmdir(folder)

    def run(self) -> None:
        """Go through the instructions of a step."""
        self._runtime.step(return_outputs=False)

    def _perform(self, action: Any, context: Any) -> None:
        """Compute what an action of the runtime says."""
        worker = self._mail.worker
        ops = [
            Op(x.stage_index, pipelining.letter(x), x.microbatch_index)
            for x in action.sub_actions or (action,)
        ]
        # The runtime accepts a schedule with a backward for each forward only.
        wanted = ops if self._recorded else [op for op in ops if op.kind == "F"]
        for op in wanted:
            if op.kind in "BI" and (op.stage, op.microbatch) in self._again:
                # While the gradient is still on its way.
                worker.perform(0, op._replace(kind="R"))
        for op in ops:
            self._receive(op)
        if wanted:
            worker.perform(0, together(wanted))

    def _receive(self, op: Op) -> None:
        """Wait for what an instruction needs of another process."""
        j, kind, i = op
        routes = self._mail.routes
        if kind == "F" and routes.is_away(j - 1):
            pipelining.wait(self._runtime, "fwd_recv_ops", j, i)
            self._mail.arrived(j, i)
        elif kind in "BI" and routes.is_away(j + 1):
            pipelining.wait(self._runtime, "bwd_recv_ops", j, i)
            if self._recorded:
                self._mail.grads_arrived(j, i)
