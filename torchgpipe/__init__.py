"""Pipeline parallelism for PyTorch: models that are too big for one accelerator, in one process.

What most programs need comes first: :class:`GPipe` wraps an ``nn.Sequential``,
:class:`MappedGPipe` any module by a device map, and :class:`ScheduledLoss` trains under any
schedule. :func:`plan` chooses the numbers, and :func:`trace` shows where the time of a step goes.
A name loads the modules that it needs when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchgpipe.gpipe import GPipe
    from torchgpipe.mapped_gpipe import MappedGPipe
    from torchgpipe.partition.keeping import Offload
    from torchgpipe.plans import plan
    from torchgpipe.recompute.once import OncePerMiniBatch
    from torchgpipe.recompute.runs import (
        is_checkpointing,
        is_recomputing,
        keep,
        verify_recomputation,
    )
    from torchgpipe.scheduled import ScheduledLoss, arguments
    from torchgpipe.show.timeline import Timeline
    from torchgpipe.tracing import trace
    from torchgpipe.values.marks import Chunk, Chunks, NoChunk, PerMicroBatch

#: Not sorted: the ten names that are used most come first.
__all__ = [
    "GPipe",
    "MappedGPipe",
    "ScheduledLoss",
    "plan",
    "trace",
    "Chunks",
    "NoChunk",
    "Chunk",
    "Offload",
    "arguments",
    "PerMicroBatch",
    "OncePerMiniBatch",
    "Timeline",
    "is_checkpointing",
    "is_recomputing",
    "keep",
    "verify_recomputation",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "gpipe": ("GPipe",),
    "mapped_gpipe": ("MappedGPipe",),
    "partition.keeping": ("Offload",),
    "plans": ("plan",),
    "recompute.once": ("OncePerMiniBatch",),
    "recompute.runs": ("is_checkpointing", "is_recomputing", "keep", "verify_recomputation"),
    "scheduled": ("ScheduledLoss", "arguments"),
    "show.timeline": ("Timeline",),
    "tracing": ("trace",),
    "values.marks": ("Chunk", "Chunks", "NoChunk", "PerMicroBatch"),
}

#: Modules that have documented names. ``import torchgpipe`` is enough to use these modules.
_MODULES = {"balance", "batchnorm", "gpipe", "schedule", "skip"}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is not None:
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=None)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
