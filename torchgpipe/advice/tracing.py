"""Tracing: the timeline of a user's own model, on whatever devices it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchgpipe.advice.watch import Watch
from torchgpipe.devices.recorder import Recorder, forget_peak, peak_memory
from torchgpipe.engine.recorded import Recording, Traceable
from torchgpipe.show.describe import StepFigures
from torchgpipe.show.timeline import Timeline

__all__ = ["trace"]


@contextmanager
def trace(model: nn.Module) -> Iterator[Timeline]:
    """Take the times of all steps of a model within a ``with`` block.

    ::

        with torchgpipe.trace(model) as timeline:
            for input, target in batches:
                F.cross_entropy(model(input), target).backward()
        print(timeline)
        timeline.svg("step.svg")

    Run a step before the block: the first one is slower, as memory is allocated and kernels are
    loaded. On accelerators events take the times, which the host waits for at the end of the block.
    Peaks of memory count from the beginning of the block, so
    :func:`torch.accelerator.max_memory_allocated` does, too. Afterwards ``model.describe()`` has
    times and memory, and beside them what a plan had predicted.

    Args:
        model: a :class:`~torchgpipe.GPipe`, :class:`~torchgpipe.ScheduledLoss`,
            :class:`~torchgpipe.MappedGPipe` or :class:`~torchgpipe.distributed.Pipe`, or a module
            that has one of these. Of a ``Pipe`` it is the part of this process.

    Yields:
        The timeline, which has its spans when the block ends.

    Raises:
        TypeError: no such model is there.
        RuntimeError: the model is being traced already.
    """
    wrapper = _found(model)
    holder, devices = wrapper._traced()
    if holder.recording is not None:
        raise RuntimeError(
            "a model is traced once at a time (model: traced already); end the other trace before"
        )
    for device in dict.fromkeys(devices):
        forget_peak(device)
    recording = Recording(Recorder(devices))
    watch = Watch(wrapper, recording)
    timeline = Timeline([])
    holder.recording = recording
    try:
        yield timeline
    finally:
        holder.recording = None
        watch.stop()
        timeline.spans = recording.recorder.spans()
        found = {str(device): peak_memory(device) for device in devices}
        timeline.host = recording.recorder.host
        timeline.memory = {name: size for name, size in found.items() if size is not None}
        timeline.advisor = watch.end(timeline)
        holder.figures = StepFigures.of(timeline) or holder.figures


def _found(model: nn.Module) -> Traceable:
    """The wrapper in a model."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, Traceable):
                return module
    raise TypeError(
        "only a wrapped model can be traced, or a module that has one (model: "
        f"{type(model).__name__}); wrap it first, as in GPipe(layers, balance)"
    )
