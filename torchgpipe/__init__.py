"""Pipeline parallelism with micro-batches and checkpointing (GPipe) for PyTorch."""

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

__all__ = [
    "Chunk",
    "Chunks",
    "GPipe",
    "MappedGPipe",
    "NoChunk",
    "Offload",
    "OncePerMiniBatch",
    "PerMicroBatch",
    "ScheduledLoss",
    "Timeline",
    "arguments",
    "is_checkpointing",
    "is_recomputing",
    "keep",
    "plan",
    "trace",
    "verify_recomputation",
    "__version__",
]

__version__ = "0.1.0"
