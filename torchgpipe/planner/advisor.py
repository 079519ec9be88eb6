"""The advisor: tries other settings, one change at a time, and says what helps a step most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from statistics import mean

from torchgpipe.planner.cuts import cut, others
from torchgpipe.planner.observed import LATE
from torchgpipe.planner.replays import TracedStep, Wrapping
from torchgpipe.schedule.candidates import built_in
from torchgpipe.schedule.program import Overlap, operations_of
from torchgpipe.schedule.simulator import simulate
from torchgpipe.show.timeline import Advice

__all__: list[str] = []

#: The number of balances that are replayed, at most.
BALANCES = 200
#: The least gain that is worth a sentence.
LEAST = 0.03
#: The share of the largest gain from which on a change that needs no more memory is preferred.
ENOUGH = 0.7


class Advisor:
    """The advisor of one traced step."""

    def __init__(self, step: TracedStep) -> None:
        self._step = step

    @cached_property
    def advice(self) -> Advice | None:
        """The change that gains the most; None if none is worth it, or nobody can tell."""
        # A copy, whose replays are forgotten.
        step = replace(self._step)
        # As long as there are such copies, everything else is beside the point.
        if step.strays >= LEAST:
            return _stray(step, step.strays)
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
    for name, schedule in built_in(max(setting.placement) + 1, setting.chunks):
        kinds = {op.kind for op in operations_of(schedule.program)}
        # Nobody knows how long the host takes for others.
        is_known = step.late <= LATE or kinds <= known
        # What two computations gain side by side, nobody can tell beforehand.
        overlaps = any(isinstance(x, Overlap) for line in schedule.program for x in line)
        if schedule.placement == setting.placement and is_known and not overlaps:
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
    return f"; {name} has had {step.memory[name] / 2**20:.1f} MiB in use"
