"""Tracing: the timeline of a user's own model, on whatever devices it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.devices.recorder import Recorder, forget_peak, peak_memory
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine.recorded import Recording, Traceable
from torchgpipe.gpipe import GPipe
from torchgpipe.mapped_gpipe import MappedGPipe, judged
from torchgpipe.partition.keeping import keepings_of
from torchgpipe.planner.advice import Observed, advice_on
from torchgpipe.planner.observed import Looking, Wait
from torchgpipe.scheduled import ScheduledLoss
from torchgpipe.show.figures import StepFigures
from torchgpipe.show.timeline import Advice, Timeline
from torchgpipe.values.division import row_count

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
    advised = _advised(wrapper, devices)
    watch = None if advised is None else Watch(wrapper, advised, recording)
    timeline = Timeline([])
    holder.recording = recording
    try:
        yield timeline
    finally:
        holder.recording = None
        if watch is not None:
            watch.hook.remove()
        timeline.spans = recording.recorder.spans()
        peaks = {str(device): peak_memory(device) for device in devices}
        timeline.host = recording.recorder.host
        timeline.memory = {name: size for name, size in peaks.items() if size is not None}
        if watch is not None and timeline.spans:
            timeline.advice = watch.advice(timeline)
        holder.figures = StepFigures.of(timeline) or holder.figures


def _found(model: nn.Module) -> Traceable:
    """The wrapper in a model."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, Traceable):
            return module
    raise TypeError(
        "only a wrapped model can be traced, or a module that has one (model: "
        f"{type(model).__name__}); wrap it first, as in GPipe(layers, balance)"
    )


def _advised(model: Traceable, devices: Sequence[torch.device]) -> GPipe | MappedGPipe | None:
    """The wrapper to advise on: no rule is for a ``Pipe``, slices or the CPU, which is the host."""
    wrapper = model.model if isinstance(model, ScheduledLoss) else model
    if not isinstance(wrapper, GPipe | MappedGPipe) or not all(map(has_streams, devices)):
        return None
    return None if isinstance(wrapper, MappedGPipe) and wrapper.slices != 1 else wrapper


class Watch:
    """A wrapper whose calls are looked at until its hook is removed, to advise on the last step."""

    def __init__(self, model: Any, wrapper: GPipe | MappedGPipe, recording: Recording) -> None:
        self._wrapper, self._rows = wrapper, 0
        self._recorder = recorder = recording.recorder
        self._waits: list[Callable[[], Wait | None]] = []
        self.hook = model.register_forward_pre_hook(self._called, with_kwargs=True)
        # Stages as graphs do not run the layers' code, and within a mode that looks at functions
        # compiled modules would be compiled anew.
        is_eager = getattr(model, "stages", "eager") == "eager"
        if is_eager and not any(map(is_compiled, wrapper.module.modules())):
            recorder.at_steps.append(self._waits.clear)
            recording.within = lambda mark: Looking(recorder, mark.stream.device, self._waits)

    def _called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._rows = row_count((args, kwargs))

    def advice(self, timeline: Timeline) -> Advice | None:
        """Advise on the last step, when the timeline has its spans."""
        model, step = self._wrapper, timeline.step()
        shares = step.shares
        # The rules are about training steps. On virtual accelerators without costs no step takes
        # any time.
        if not {"B", "W"} & {x.kind for x in step.spans} or not any(x.busy for x in shares):
            return None
        chunks = 1 + max(x.microbatch or 0 for x in step.spans if x.computes)
        first = {x.stage or 0: x for x in step.spans if x.kind == "F" and not x.microbatch}
        devices = [torch.device(x.stream.device_name) for _, x in sorted(first.items())]
        modes, kept = keepings_of(model.checkpoint, len(first)), self._recorder.kept()
        # A cell that is computed again keeps all from its R on, and not from its F on.
        held = {j: max(0.0, kept.get(("R", j), size)) for (_, j), size in kept.items()}
        waits = [wait for call in self._waits if (wait := call()) is not None]
        if isinstance(model, MappedGPipe):
            calls, workers = judged(model)
            count, balancing = len(calls), "balance.map_by_time(devices, model.module, sample)"
            # Advice may propose more threads only if they compute the same as one.
            threads = model.threads if workers.are_equal(True) else len(first)
        else:
            count, threads = len(model), 0
            balancing = f"balance.balance_by_time({len(first)}, model.module, sample)"
        layout = count, balancing, threads
        observed = Observed(step, shares, chunks, self._rows, modes, devices, held, waits, *layout)
        return advice_on(observed)
