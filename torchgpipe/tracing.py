"""Tracing: the timeline of a user's own model, on whatever devices it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from statistics import mean
from typing import Any

import torch
from torch import nn

from torchgpipe.devices.recorder import Recorder, forget_peak, peak_memory
from torchgpipe.devices.streams import has_streams
from torchgpipe.engine.recorded import Recording, Traceable
from torchgpipe.engine.stages import stages_of
from torchgpipe.engine.step_plan import Choice
from torchgpipe.gpipe import GPipe
from torchgpipe.mapped_gpipe import MappedGPipe, judged
from torchgpipe.partition.keeping import keepings_of
from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.figures import LATE, figures_of
from torchgpipe.planner.observed import HostWait, Layers, TracedLayer, Waits
from torchgpipe.planner.replays import Modules, TracedStep, Wrapping
from torchgpipe.planner.trial import simulated
from torchgpipe.schedule.program import operations_of
from torchgpipe.schedule.simulator import simulate
from torchgpipe.scheduled import ScheduledLoss
from torchgpipe.show.describe import StepFigures
from torchgpipe.show.tables import as_mib
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


class Watch:
    """A model whose layers are timed until :meth:`stop`; nobody advises on a ``Pipe``."""

    def __init__(self, model: Traceable, recording: Recording) -> None:
        self._recorder = recorder = recording.recorder
        self._choice: Choice | None = None
        self._model: GPipe | MappedGPipe | None = None
        self._layers: Layers | None = None
        self._waits: Waits | None = None
        #: The rows of a mini-batch of a map.
        self._rows = 0
        self._handles: list[Any] = []
        found: list[tuple[nn.Module, torch.device]] = []
        if isinstance(model, ScheduledLoss):
            self._model, self._choice = model.model, model.schedule
        elif isinstance(model, GPipe | MappedGPipe):
            self._model = model
        # Graphs do not run layers, and a stage with hooks is none.
        if isinstance(self._model, GPipe) and getattr(model, "stages", "eager") == "eager":
            for part, device in zip(self._model.partitions, self._model.devices):
                assert isinstance(part, nn.Sequential)
                found += [(layer, device) for layer in part]
        # Hooks, and modes, would have modules compiled anew.
        elif isinstance(model, MappedGPipe) and not any(x.compiled for x in judged(model)[0]):
            found = [(x.mapped.module, x.mapped.device) for x in judged(model)[0]]
        # On the CPU, which is the host, too, there is no advice to time layers for.
        if not found or not all(has_streams(device) for _, device in found):
            return
        self._layers = Layers(found, recorder)
        if isinstance(model, MappedGPipe):
            self._waits = Waits(recorder)
            recording.within = self._waits.within
            self._handles.append(model.register_forward_pre_hook(self._given, with_kwargs=True))

    def stop(self) -> None:
        """Leave the model alone."""
        if self._layers is not None:
            self._layers.stop()
        for handle in self._handles:
            handle.remove()

    def _given(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._rows = row_count((args, kwargs))

    def end(self, timeline: Timeline) -> Advisor | None:
        """Make an advisor of what was seen, when the timeline has its spans, if there is a step."""
        if self._model is None or not timeline.spans:
            return None
        last = timeline.step()
        shares = last.shares
        if not {"B", "W"} & {x.kind for x in last.spans}:
            # Without a backward there are other settings to think of.
            return None
        if not any(x.busy + x.recompute for x in shares) or any(x.host is None for x in shares):
            # Without costs, virtual accelerators take no time. The CPU is the host and the device.
            return None
        model, chunks = self._model, 1 + max(x.microbatch or 0 for x in last.spans if x.computes)
        if isinstance(model, MappedGPipe):
            return self._mapped(model, timeline, chunks)
        setting = Wrapping(
            tuple(model.balance),
            _placement(model.devices, self._choice is None),
            chunks,
            keepings_of(model.checkpoint, len(model.devices)),
            self._choice,
            tuple(stages_of(model).skip_layout.pairs),
        )
        layers = self._layers
        found = ([], 0) if layers is None else (layers.found(), layers.rows)
        return self._advisor(timeline, setting, model.devices, *found)

    def _mapped(self, model: MappedGPipe, timeline: Timeline, chunks: int) -> Advisor | None:
        """The advisor of any module, of which each visit of a device is a partition."""
        layers, waits = self._layers, self._waits
        if model.slices != 1:
            # Nobody knows how long slices of other lengths would take.
            return None
        last = timeline.step().spans
        first = {x.stage: x for x in last if x.kind == "F" and not x.microbatch}
        n = len(first)
        if layers is None or waits is None or {*first} != {*range(n)}:
            # Nobody knows of a visit without modules.
            return None
        devices = [torch.device(first[j].stream.place) for j in range(n)]
        order = layers.called
        modules = Modules(model.device_map, [judged(model)[0][k].mapped for k in order])
        is_cut = modules.devices == devices
        ways = {(x.stage, x.target) for x in last if x.kind == "copy"}
        setting = Wrapping(
            modules.balance if is_cut else (1,) * n,
            tuple(range(n)),
            chunks,
            keepings_of(model.checkpoint, n),
            None,
            tuple(sorted((j, k) for j, k in ways if j is not None and k is not None and k > j + 1)),
            model.threads,
        )
        return self._advisor(
            *(timeline, setting, devices, layers.found(order) if is_cut else []),
            self._rows // chunks,
            waits.found({j: x.end for j, x in first.items() if j is not None}),
            modules=modules,
            divisible=is_cut and judged(model)[1].are_equal(True),
        )

    def _advisor(
        self,
        timeline: Timeline,
        setting: Wrapping,
        devices: Sequence[torch.device],
        layers: Sequence[TracedLayer],
        rows: int,
        waits: Mapping[int, HostWait] | None = None,
        **more: Any,
    ) -> Advisor:
        last = timeline.step()
        late = mean(x.host or 0.0 for x in last.shares)
        figures = figures_of(
            *(last.spans, setting.balance, self._choice is None, layers, rows),
            *(late, waits or {}, max(1, setting.threads)),
        )
        kept = self._recorder.kept()
        return Advisor(
            *(setting, figures, last.shares, last.makespan, devices),
            stages_of(self._model).room if isinstance(self._model, GPipe) else None,
            # Of a cell that is computed again, F keeps the output alone.
            {j: max(0.0, kept.get(("R", j), size)) for (_, j), size in kept.items()},
            timeline.memory,
            **more,
        )


def _placement(devices: Sequence[torch.device], by_autograd: bool) -> tuple[int, ...]:
    """The worker of each partition."""
    order = [*dict.fromkeys(devices)]
    # Under autograd, partitions of one device have a stream each.
    if by_autograd or len(order) == 1:
        return tuple(range(len(devices)))
    return tuple(order.index(x) for x in devices)


#: The number of balances that are replayed, at most.
BALANCES = 200
#: The least gain that is worth a sentence.
LEAST = 0.03
#: The share of the largest gain from which on a change that needs no more memory is preferred.
ENOUGH = 0.7


class Advisor(TracedStep):
    """The last step of a trace, with advice."""

    @cached_property
    def advice(self) -> Advice | None:
        """The change that gains the most; None if none is worth it, or nobody can tell."""
        # A copy, whose replays are forgotten.
        step = replace(self)
        # As long as there are such copies, everything else is beside the point.
        strays = step.strays
        if strays >= LEAST:
            return _stray(step, strays)
        if not step.is_right:
            return None
        # Of those with a change of one kind, the smallest change comes first.
        kinds = [_balances, _chunks, _threads, _modes, _schedules]
        found = []
        for setting, advice in (x for kind in kinds for x in kind(step)):
            # The plan of the model may know that it fits.
            fits = advice.caution and step.excess(setting) == 0
            caution = "" if fits else advice.caution
            found.append(replace(advice, gain=step.gain(setting), caution=caution))
        most = max((x.gain for x in found), default=0.0)
        if most < LEAST:
            return None
        # What needs no more memory is better than what gains a little more.
        enough = [x for x in found if x.gain >= ENOUGH * most and not x.caution]
        # Of equal gains, the first is the smallest change.
        return max(enough or found, key=lambda x: round(x.gain, 2))


def _stray(step: TracedStep, gain: float) -> Advice:
    """Name the layers that copy between devices by themselves, and what to do about it."""
    found = {k: layer for k, layer in enumerate(step.figures.layers) if layer.copied}
    if len(found) > 1:
        reason = f"layers {', '.join(map(str, found))} copy between devices, which wait for that"
        remedy = "with what they read on their own devices, the step"
    else:
        ((k, layer),) = found.items()
        places = " and ".join([layer.device, *layer.copied])
        reason = f"layer {k} copies between {places}, which wait for that"
        remedy = f"with what it reads on {layer.device}, the step"
    return Advice(reason, {}, gain, remedy=remedy)


def _balances(step: TracedStep) -> Iterator[tuple[Wrapping, Advice]]:
    """Yield the best balance that is found by moving one layer at a time."""
    setting, times = step.setting, step.figures.layer_times
    if not times:
        # They were not timed.
        return
    even = cut(len(times), len(setting.balance), lambda _, start, stop: sum(times[start:stop]))
    found = [_moved(step, replace(setting, balance=x)) for x in (setting.balance, tuple(even))]
    best = max(found, key=step.gain)
    if best.balance == setting.balance:
        return
    computing = {x.device: x.busy + x.recompute for x in step.shares}
    slowest = max(computing, key=computing.__getitem__)
    longer = computing[slowest] / mean(computing.values()) - 1
    reason = f"{slowest} computes {longer:.0%} longer than the mean"
    before, after = (step.time(x, copies=False) or 0.0 for x in (setting, best))
    if (before - after) / step.makespan < step.gain(best) / 2:
        # Most of the gain is from copies.
        share = ((step.now or 0.0) - before) / step.makespan
        reason = f"copies between partitions hold up {share:.0%} of the step"
    modules = step.modules
    if modules is None:
        yield best, Advice(reason, {"balance": [*best.balance]}, 0.0)
    else:
        change, words = {"device_map": modules.map(best.balance)}, modules.words(best.balance)
        yield best, Advice(reason, change, 0.0, remedy=words)


def _moved(step: TracedStep, setting: Wrapping) -> Wrapping:
    """Change the balance as long as that helps."""
    left = iter(range(BALANCES))
    found: Wrapping | None = setting
    while found is not None:
        setting, gain = found, step.gain(found)
        tried = (replace(setting, balance=tuple(x)) for _, x in zip(left, others(setting.balance)))
        found = next((x for x in tried if step.gain(x) > gain), None)
    return setting


def _chunks(step: TracedStep) -> Iterator[tuple[Wrapping, Advice]]:
    m = step.setting.chunks
    for factor in (2, 4, 8):
        if m * factor <= step.figures.rows:
            reason = f"devices wait {_share(step, 'bubble')} of the step, with {m} micro-batches"
            more = replace(step.setting, chunks=m * factor)
            yield more, Advice(reason, {"chunks": more.chunks}, 0.0)
        # What a device could do without a host that is late is known for one step only.
        if m % factor == 0 and (factor == 2 or step.late < LATE):
            reason = f"devices wait for the host {step.late:.0%} of the step"
            few = replace(step.setting, chunks=m // factor)
            caution = f"larger micro-batches need more memory{_in_use(step)}"
            yield few, Advice(reason, {"chunks": few.chunks}, 0.0, caution)


def _threads(step: TracedStep) -> Iterator[tuple[Wrapping, Advice]]:
    setting, figures = step.setting, step.figures
    if not (step.divisible and figures.waits):
        return
    waited = figures.chunks * sum(x.time for x in figures.waits.values()) / step.makespan
    reason = f"the host waits for devices {waited:.0%} of the step, as .item() has it"
    caution = "forward must keep nothing of a micro-batch in a module"
    for threads in range(setting.threads + 1, min(len(setting.balance), setting.chunks) + 1):
        yield replace(setting, threads=threads), Advice(reason, {"threads": threads}, 0.0, caution)


def _modes(step: TracedStep) -> Iterator[tuple[Wrapping, Advice]]:
    modes = step.setting.modes
    reason = f"devices compute again for {_share(step, 'recompute')} of the step"
    if not any(x.recompute for x in step.shares):
        reason = f"copies of cells to the host, and back, take {_share(step, 'away')} of the step"
    caution = f"more activations are kept{_in_use(step)}"
    for mode in ("except_last", "never") if {*modes} != {"never"} else ():
        setting = replace(step.setting, modes=(mode,) * len(modes))
        yield setting, Advice(reason, {"checkpoint": mode}, 0.0, caution)


def _schedules(step: TracedStep) -> Iterator[tuple[Wrapping, Advice]]:
    setting, before = step.setting, step.setting.made()
    if setting.schedule is None or before is None:
        # That of GPipe is autograd's.
        return
    reason = f"devices wait {_share(step, 'bubble')} of the step under its schedule"
    most, known = max(simulate(before).peak), {kind for kind, _ in step.figures.times}
    for name, schedule in simulated(max(setting.placement) + 1, setting.chunks):
        kinds = {op.kind for op in operations_of(schedule.program)}
        # Nobody knows how long the host takes for others.
        is_known = step.late <= LATE or kinds <= known
        if schedule.placement == setting.placement and is_known:
            more = max(simulate(schedule).peak) > most
            caution = f"more activations are kept{_in_use(step)}" if more else ""
            advice = Advice(reason, {"schedule": name}, 0.0, caution)
            yield replace(setting, schedule=name), advice


def _share(step: TracedStep, name: str) -> str:
    """A share of the step's time, of devices on average."""
    return f"{mean(getattr(x, name) for x in step.shares):.0%}"


def _in_use(step: TracedStep) -> str:
    """Say how much memory the fullest device has had in use."""
    if not step.memory:
        return ""
    name = max(step.memory, key=step.memory.__getitem__)
    return f"; {name} has had {as_mib(step.memory[name])} MiB in use"
