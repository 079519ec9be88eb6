"""A dry run: a training step on virtual accelerators that compute shapes alone.

No operator computes a value, and no tensor of a device takes memory. So the step of a model of any
size runs in seconds, and its memory and its time are predicted: memory by the arithmetic of CUDA's
caching allocator, time by a roofline of described hardware.
"""

from torchgpipe.testing.dry_run.run import Prediction, dry_run

__all__ = ["dry_run", "Prediction"]
