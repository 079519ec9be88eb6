"""Tracing: the timeline of a user's own model, on whatever devices it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchgpipe._torch.dynamo import is_compiled
from torchgpipe.devices.recorder import Recorder, forget_peak, peak_memory
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine.recorded import Recording, Traceable
from torchgpipe.gpipe import GPipe
from torchgpipe.mapped_gpipe import MappedGPipe, judged
from torchgpipe.partition.keeping import keepings_of
from torchgpipe.planner.advice import Observed, advice_on
from torchgpipe.planner.observed import Waits
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
    watch = Watch(wrapper, recording)
    timeline = Timeline([])
    holder.recording = recording
    try:
        yield timeline
    finally:
        holder.recording = None
        watch.stop()
        timeline.spans = recording.recorder.spans()
        peaks = {str(device): peak_memory(device) for device in devices}
        timeline.host = recording.recorder.host
        timeline.memory = {name: size for name, size in peaks.items() if size is not None}
        timeline.advice = watch.end(timeline)
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


class Watch:
    """A model that is looked at until :meth:`stop`; nobody advises on a ``Pipe``."""

    def __init__(self, model: Traceable, recording: Recording) -> None:
        self._recorder = recorder = recording.recorder
        self._model: GPipe | MappedGPipe | None = None
        self._waits: Waits | None = None
        self._rows = 0
        self._handle: RemovableHandle | None = None
        #: The layers, or the mapped modules, with their devices.
        self._layers: list[tuple[nn.Module, torch.device]] = []
        if isinstance(model, ScheduledLoss):
            self._model = model.model
        elif isinstance(model, GPipe | MappedGPipe):
            self._model = model
        if isinstance(self._model, GPipe):
            for part, device in zip(self._model.partitions, self._model.devices):
                assert isinstance(part, nn.Sequential)
                self._layers += [(layer, device) for layer in part]
        elif isinstance(model, MappedGPipe):
            self._layers = [(x.mapped.module, x.mapped.device) for x in judged(model)[0]]
        # There is no advice for the CPU, since it is the host and the device at once.
        if not self._layers or not all(has_streams(device) for _, device in self._layers):
            self._model = None
            return
        assert isinstance(model, nn.Module)
        self._handle = model.register_forward_pre_hook(self._called, with_kwargs=True)
        # Stages as graphs do not run the layers' code, and within a mode that looks at functions
        # compiled modules would be compiled anew.
        is_eager = getattr(model, "stages", "eager") == "eager"
        if is_eager and not any(is_compiled(x) for y, _ in self._layers for x in y.modules()):
            self._waits = Waits(recorder)
            recording.within = self._waits.within

    def stop(self) -> None:
        """Leave the model alone."""
        if self._handle is not None:
            self._handle.remove()

    def _called(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._rows = row_count((args, kwargs))

    def end(self, timeline: Timeline) -> Advice | None:
        """Advise on the last step, when the timeline has its spans."""
        model = self._model
        if model is None or not timeline.spans:
            return None
        if isinstance(model, MappedGPipe) and model.slices != 1:
            # There is no rule for slices of a sequence.
            return None
        last = timeline.step()
        shares = last.shares
        # The rules are about training steps. On virtual accelerators without costs no step takes
        # any time.
        if not {"B", "W"} & {x.kind for x in last.spans} or not any(x.busy for x in shares):
            return None
        first = {x.stage or 0: x for x in last.spans if x.kind == "F" and not x.microbatch}
        kept = self._recorder.kept()
        n, threads = len(first), 0
        if isinstance(model, MappedGPipe):
            balancing = "balance.map_by_time(devices, model.module, sample)"
            # Advice may propose more threads only if they compute the same as one.
            threads = model.threads if judged(model)[1].are_equal(True) else n
        else:
            balancing = f"balance.balance_by_time({n}, model.module, sample)"
        return advice_on(
            Observed(
                shares,
                last.makespan,
                1 + max(x.microbatch or 0 for x in last.spans if x.computes),
                self._rows,
                keepings_of(model.checkpoint, n),
                [torch.device(x.stream.device_name) for _, x in sorted(first.items())],
                # A cell that is computed again keeps all from its R on, and not from its F on.
                {j: max(0.0, kept.get(("R", j), size)) for (_, j), size in kept.items()},
                timeline.memory,
                [] if self._waits is None else self._waits.ended(),
                len(self._layers),
                balancing,
                threads,
            )
        )
