"""Private names of PyTorch's pipelining: schedules as files and as actions, and the default store.

Nothing imports this module but :mod:`torchgpipe.distributed`. TorchTitan uses the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules

from torchgpipe._torch.dynamo import VERSION

__all__: list[str] = []

#: For the name of each of PyTorch's actions that compute, our letter for the computation.
LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}

#: For the name of each of PyTorch's actions that send or receive: which of the two it does, and the
#: letter of the computation that it comes after (send) or before (receive).
MESSAGES = {
    "SEND_F": ("send", "F"),
    "SEND_B": ("send", "B"),
    "RECV_F": ("receive", "F"),
    "RECV_B": ("receive", "B"),
}

#: Actions by which FSDP gathers weights, frees them, and reduces gradients. :func:`lowered` leaves
#: them out, since our stages do all of this themselves.
OTHERS = {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
#: Actions that wait for FSDP's reductions, or (from PyTorch 2.15 on) for what was sent.
#: :func:`lowered` leaves them out, since our processes wait for both at the end of a step.
WAITS = {"WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"}


def verify_version() -> None:
    """Check that PyTorch is new enough.

    Raises:
        ImportError: it is not.
    """
    if VERSION < (2, 13) or not hasattr(schedules, "_PipelineScheduleRuntime"):
        raise ImportError(
            "pipelines over several processes need the runtime of torch.distributed.pipelining of "
            f"PyTorch 2.13 or newer (PyTorch: {torch.__version__}); install a newer PyTorch, or "
            "use torchgpipe.ScheduledLoss in one process"
        )


def lowered(
    path: str, here: Sequence[int], count: int, chunks: int, device: torch.device, group: Any
) -> list[Any]:
    """The actions of one process for a schedule in a file that has computations alone.

    Args:
        path: the file.
        here: the stages of the process.
        count: the number of all stages.
        chunks: the number of micro-batches.
        device: the device of the process.
        group: the processes.
    """
    # These stages compute nothing. Given empty examples of tensors, they do not send each other
    # messages to find the shapes.
    stages = [PipelineStage(nn.Identity(), j, count, device, (), (), group=group) for j in here]
    runtime_class: Any = schedules._PipelineScheduleRuntime
    runtime = runtime_class(stages, chunks, loss_fn=_no_loss, scale_grads=False)
    runtime._load_csv(path, format="compute_only")
    actions: list[Any] = runtime.pipeline_order_with_comms[runtime.rank]
    return [x for x in actions if x.computation_type.name not in OTHERS | WAITS]


def read(action: Any) -> tuple[str, list[tuple[int, str, int]]]:
    """Read what an action does (compute, send or receive), and for which stages and micro-batches.

    Returns:
        The word, and for each part of the action the stage, our letter, and the micro-batch.
    """
    parts = []
    does = ""
    for x in action.sub_actions or (action,):
        name = x.computation_type.name
        does, letter = MESSAGES[name] if name in MESSAGES else ("compute", LETTERS[name])
        parts.append((x.stage_index, letter, x.microbatch_index))
    return does, parts


def reduce_gradients(module: Any) -> None:
    """Have FSDP2 reduce the gradients of a module that it has sharded, and let go of the rest."""
    # perform_reduce_grad() is a method of PyTorch's stages that needs nothing of them but `submod`.
    stage: Any = SimpleNamespace(submod=module)
    PipelineStage.perform_reduce_grad(stage, 1)


def default_store() -> Any:
    """The table of keys and values that the processes have started with."""
    return distributed_c10d._get_default_store()


def _no_loss(*_: Any) -> Any:
    raise AssertionError("the last stage computes its loss itself")
