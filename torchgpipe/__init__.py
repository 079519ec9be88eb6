"""Pipeline parallelism with micro-batches and checkpointing (GPipe) for PyTorch."""

from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing", "__version__"]

__version__ = "0.1.0"
