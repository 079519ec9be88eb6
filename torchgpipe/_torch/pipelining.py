"""Private names of PyTorch's pipelining: its runtime, schedules as files, and the default store.

Nothing imports this module but :mod:`torchgpipe.distributed`. TorchTitan uses the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, schedules

from torchgpipe._torch.dynamo import VERSION

__all__: list[str] = []

#: The computations of the runtime, and our letters for them.
LETTERS = {
    "FORWARD": "F",
    "FULL_BACKWARD": "B",
    "BACKWARD_INPUT": "I",
    "BACKWARD_WEIGHT": "W",
}

#: The computations that we see to.
KINDS = (*LETTERS, "OVERLAP_F_B")


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


def runtime(stages: Sequence[Any], chunks: int, recorded: bool) -> Any:
    """Make a runtime for the stages of one process; a loss tells it that there is a backward."""
    made: Any = schedules._PipelineScheduleRuntime
    return made([*stages], chunks, loss_fn=_no_loss if recorded else None, scale_grads=False)


def load(runtime: Any, path: str) -> None:
    """Have a runtime read a schedule that has computations alone."""
    runtime._load_csv(path, format="compute_only")


def kind(name: str) -> Any:
    """The runtime's own name of a kind of computation."""
    return getattr(schedules, name)


def letter(action: Any) -> str:
    """Our letter for what an action computes."""
    return LETTERS[action.computation_type.name]


def wait(runtime: Any, table: str, j: int, i: int) -> None:
    """Wait for a message of a stage and a micro-batch that the runtime has begun to receive."""
    for work in getattr(runtime, table).pop((j, i)):
        work.wait()


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor has contiguous memory of its own, which nobody else can write to."""
    storage = tensor.untyped_storage()
    # Memory that PyTorch has not allocated may be anybody's.
    return (
        tensor.is_contiguous()
        and storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and _uses(tensor) == _uses(torch.empty(1))
    )


def _uses(tensor: Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def reduce_gradients(module: Any) -> None:
    """Have FSDP2 reduce the gradients of a module that it has sharded, and let go of the rest."""
    # PyTorch's stages do so when the last micro-batch is through.
    stage: Any = SimpleNamespace(submod=module)
    PipelineStage.perform_reduce_grad(stage, 1)


def default_store() -> Any:
    """The table of keys and values that the processes have started with."""
    return distributed_c10d._get_default_store()


def _no_loss(*_: Any) -> Any:
    raise AssertionError("the last stage computes its loss itself")
