"""The advisor: tries other settings, one change at a time, and says what helps a step most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torchgpipe.advice.figures import LATE, Layer
from torchgpipe.advice.replays import Replays, Setting, Traced
from torchgpipe.planner.cuts import cut, others
from torchgpipe.schedule.language import Schedule
from torchgpipe.schedule.program import Overlap, operations_of
from torchgpipe.schedule.search import built_in
from torchgpipe.schedule.simulator import simulate
from torchgpipe.timeline.advice import Advice

__all__: list[str] = []

#: The number of balances that are replayed, at most.
BALANCES = 200


@dataclass(frozen=True)
class Try:
    """A setting with one change.

    Args:
        setting: the setting.
        change: the change, as a user writes it.
        reason: what takes the time now.
        caution: what has to be seen to.
        words: the change in words; empty if the change itself is short.
    """

    setting: Setting
    change: Mapping[str, Any]
    reason: str
    caution: str = ""
    words: str = ""


def tries(replays: Replays) -> list[Try]:
    """All settings to try; of those with a change of one kind, the smallest change comes first."""
    kinds = [_balances, _chunks, _threads, _modes, _schedules]
    return [x for kind in kinds for x in kind(replays)]


def _balances(replays: Replays) -> Iterator[Try]:
    """Yield the best balance that is found by moving one layer at a time."""
    traced = replays.traced
    figures, setting = traced.figures, traced.setting
    if not figures.layers:
        # They were not timed.
        return
    times = figures.layer_times
    blocks = len(setting.balance)
    even = tuple(cut(len(times), blocks, lambda _, start, stop: sum(times[start:stop])))
    found = [_moved(replays, replace(setting, balance=x)) for x in (setting.balance, even)]
    best = max(found, key=replays.gain)
    if best.balance == setting.balance:
        return
    reason = f"{traced.slowest} computes {traced.longer:.0%} longer than the mean"
    before, behind = (replays.time(x, copies=False) for x in (setting, best))
    assert replays.now is not None
    assert before is not None
    assert behind is not None
    if (before - behind) / traced.makespan < replays.gain(best) / 2:
        # Most of the gain is from copies.
        share = (replays.now - before) / traced.makespan
        reason = f"copies between partitions hold up {share:.0%} of the step"
    modules = traced.modules
    if modules is None:
        yield Try(best, {"balance": [*best.balance]}, reason)
    else:
        change = {"device_map": modules.map(best.balance)}
        yield Try(best, change, reason, words=modules.words(best.balance))


def _moved(replays: Replays, setting: Setting) -> Setting:
    """Change the balance as long as that helps."""
    gain, left = replays.gain(setting), BALANCES
    moved = True
    while moved:
        moved = False
        for balance in others(setting.balance):
            left -= 1
            if left < 0:
                break
            other = replace(setting, balance=tuple(balance))
            if replays.gain(other) > gain:
                setting, gain, moved = other, replays.gain(other), True
                break
    return setting


def _chunks(replays: Replays) -> Iterator[Try]:
    traced = replays.traced
    m = traced.setting.chunks
    for factor in (2, 4, 8):
        if m * factor <= traced.figures.rows:
            reason = f"devices wait {traced.bubble:.0%} of the step, with {m} micro-batches"
            setting = replace(traced.setting, chunks=m * factor)
            yield Try(setting, {"chunks": m * factor}, reason)
        # What a device could do without a host that is late is known for one step only.
        if m % factor == 0 and (factor == 2 or traced.late < LATE):
            reason = f"devices wait for the host {traced.late:.0%} of the step"
            setting = replace(traced.setting, chunks=m // factor)
            caution = f"larger micro-batches need more memory{traced.memory}"
            yield Try(setting, {"chunks": m // factor}, reason, caution)


def _threads(replays: Replays) -> Iterator[Try]:
    traced = replays.traced
    setting = traced.setting
    if not (traced.divisible and traced.figures.waits):
        return
    reason = f"the host waits for devices {traced.waited:.0%} of the step, as .item() has it"
    for threads in range(setting.threads + 1, min(len(setting.balance), setting.chunks) + 1):
        caution = "forward must keep nothing of a micro-batch in a module"
        yield Try(replace(setting, threads=threads), {"threads": threads}, reason, caution)


def _modes(replays: Replays) -> Iterator[Try]:
    traced = replays.traced
    reason = f"devices compute again for {traced.again:.0%} of the step"
    for mode in ("except_last", "never"):
        setting = replace(traced.setting, modes=(mode,) * len(traced.setting.modes))
        if any(x != "never" for x in traced.setting.modes):
            caution = f"more activations are kept{traced.memory}"
            yield Try(setting, {"checkpoint": mode}, reason, caution)


def _schedules(replays: Replays) -> Iterator[Try]:
    traced = replays.traced
    setting = traced.setting
    if setting.schedule is None:
        # That of GPipe is autograd's.
        return
    reason = f"devices wait {traced.bubble:.0%} of the step under its schedule"
    before = setting.made()
    assert before is not None

    def more(schedule: Schedule) -> bool:
        return max(simulate(schedule).peak) > max(simulate(before).peak)

    for name, schedule in built_in(max(setting.placement) + 1, setting.chunks):
        kinds = {op.kind for op in operations_of(schedule.program)}
        known = {kind for kind, _ in traced.figures.times}
        if traced.late > LATE and not kinds <= known:
            # Nobody knows how long the host takes for the others.
            continue
        # What two computations gain side by side, nobody can tell beforehand.
        overlaps = any(isinstance(x, Overlap) for line in schedule.program for x in line)
        if schedule.placement == setting.placement and not overlaps:
            caution = f"more activations are kept{traced.memory}" if more(schedule) else ""
            yield Try(replace(setting, schedule=name), {"schedule": name}, reason, caution)


#: The least gain that is worth a sentence.
LEAST = 0.03
#: The share of the largest gain from which on a change that needs no more memory is preferred.
ENOUGH = 0.7


class Advisor:
    """The advisor of one traced step.

    Args:
        traced: the step.
    """

    def __init__(self, traced: Traced) -> None:
        self._traced = traced

    @cached_property
    def advice(self) -> Advice | None:
        """The change that gains the most; None if none is worth it, or nobody can tell."""
        replays = Replays(self._traced)
        # As long as there are such copies, everything else is beside the point.
        stray = replays.without_strays
        if stray is not None and stray >= LEAST:
            reason, remedy = _stray(self._traced.figures.layers)
            return Advice(reason, {}, stray, remedy=remedy)
        if not replays.are_right:
            return None
        gains = [(replays.gain(x.setting), _known(x, replays)) for x in tries(replays)]
        most = max((gain for gain, _ in gains), default=0.0)
        if most < LEAST:
            return None
        # What needs no more memory is better than what gains a little more.
        enough = [x for x in gains if x[0] >= ENOUGH * most and not x[1].caution]
        # Of equal gains, the first is the smallest change.
        gain, best = max(enough or gains, key=lambda x: round(x[0], 2))
        return Advice(best.reason, best.change, gain, best.caution, best.words)


def _stray(layers: Sequence[Layer]) -> tuple[str, str]:
    """Name the layers that copy between devices by themselves, and what to do about it."""
    found = {k: layer for k, layer in enumerate(layers) if layer.copied}
    if len(found) > 1:
        reason = f"layers {', '.join(map(str, found))} copy between devices, which wait for that"
        return reason, "with what they read on their own devices, the step"
    ((k, layer),) = found.items()
    places = " and ".join([layer.device, *layer.copied])
    reason = f"layer {k} copies between {places}, which wait for that"
    return reason, f"with what it reads on {layer.device}, the step"


def _known(change: Try, replays: Replays) -> Try:
    """A change without its caution, where the plan of the model knows that it fits."""
    fits = change.caution and replays.excess(change.setting) == 0
    return replace(change, caution="") if fits else change
