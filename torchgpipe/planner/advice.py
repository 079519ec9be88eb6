"""Advice: rules over the shares of a traced step, each of which says the figure that it goes by.

The first rule that applies is the advice. What waits for a copy, or for the host, hides all else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from torchgpipe.devices.recorder import memory_total
from torchgpipe.partition.keeping import Keeping, is_policy
from torchgpipe.planner.given import USABLE
from torchgpipe.planner.observed import Wait
from torchgpipe.show.shares import Shares
from torchgpipe.show.tables import as_mib
from torchgpipe.show.timeline import Advice, Timeline

__all__: list[str] = []

#: A rule applies from this share of a step on: waits in a function with a name, waits for the host,
#: recomputation or copies of cells to the host, and the bubble.
NAMED, LATE, AGAIN, BUBBLE = 0.03, 0.1, 0.05, 0.2

#: How much longer than the mean the slowest device may compute.
UNEVEN = 0.1


@dataclass(frozen=True)
class Observed:
    """A step as it was traced, and how the model is wrapped."""

    step: Timeline
    shares: Sequence[Shares]
    chunks: int
    #: The rows of the mini-batch; 0 if unknown.
    rows: int
    #: The checkpoint modes, and the device of each stage.
    modes: Sequence[Keeping]
    devices: Sequence[torch.device]
    #: The bytes that a cell of each stage keeps for its backward, as far as known.
    kept: Mapping[int, float]
    waits: Sequence[Wait]
    #: The number of layers, or of blocks, and the call that finds a balance of these.
    count: int
    balancing: str
    #: The threads of a map that several may compute; 0 for other wrappers.
    threads: int = 0

    def share(self, name: str) -> float:
        """A share of the step's time, of devices on average."""
        return mean(getattr(x, name) or 0.0 for x in self.shares)

    def lost(self, waits: Iterable[Wait]) -> float:
        """The share of the step's time of waits, which each micro-batch has."""
        return self.chunks * sum(x.time for x in waits) / self.step.makespan


def advice_on(step: Observed) -> Advice | None:
    """The first rule that applies; None if none does."""
    rules = (_copies, _waits, _host, _balance, _modes, _bubble)
    return next((advice for rule in rules for advice in rule(step)), None)


def _copies(step: Observed) -> Iterator[Advice]:
    copies = [x for x in step.waits if x.others]
    waiting = {x.device for x in copies}
    lost = [step.lost(x for x in copies if x.device == device) for device in waiting]
    share = min(1.0, max(lost, default=0.0))
    if share >= NAMED:
        places = dict.fromkeys(y for x in copies for y in (x.device, *x.others))
        reason = (
            f"{' and '.join(map(str, places))} wait up to {share:.0%} of the step for copies "
            f"between them, by {_names(copies)}"
        )
        where = str(copies[0].device) if len(waiting) == 1 else "the device of the layer"
        yield Advice(reason, {}, remedy=f"have what is read there on {where}")


def _waits(step: Observed) -> Iterator[Advice]:
    waits = [x for x in step.waits if not x.others]
    share = step.lost(waits)
    if share < NAMED:
        return
    reason = f"the host waits for devices {min(1.0, share):.0%} of the step, in {_names(waits)}"
    most = min(len(step.devices), step.chunks)
    if 0 < step.threads < most:
        caution = "forward must keep nothing of a micro-batch in a module"
        yield Advice(reason, {"threads": most}, caution)
    elif not step.threads:
        yield Advice(reason, {}, remedy="ask for no values in forward")


def _names(waits: Sequence[Wait]) -> str:
    """The functions that take the longest, two at most."""
    times: dict[str, float] = {}
    for x in waits:
        times[x.name] = times.get(x.name, 0.0) + x.time
    names = sorted(times, key=times.__getitem__, reverse=True)
    return " and ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _host(step: Observed) -> Iterator[Advice]:
    share = step.share("host")
    if share >= LATE and step.chunks > 1:
        reason = f"devices wait for the host {share:.0%} of the step"
        caution = f"larger micro-batches need more memory{_in_use(step)}"
        yield Advice(reason, {"chunks": max(1, step.chunks // 2)}, caution)


def _balance(step: Observed) -> Iterator[Advice]:
    computing = {x.device: x.busy + x.recompute for x in step.shares}
    slowest = max(computing, key=computing.__getitem__)
    longer = computing[slowest] / mean(computing.values()) - 1
    if longer > UNEVEN and step.count > len(computing):
        reason = f"{slowest} computes {longer:.0%} longer than the mean"
        remedy = f"take the balance of {step.balancing}, if that is another one"
        yield Advice(reason, {}, remedy=remedy)


def _modes(step: Observed) -> Iterator[Advice]:
    again, away = step.share("recompute"), step.share("away")
    if any(map(is_policy, step.modes)):
        return
    if again >= AGAIN:
        reason = f"devices compute again for {again:.0%} of the step"
    elif away >= AGAIN and step.share("bubble") > BUBBLE:
        reason = f"copies of cells to the host, and back, take {away:.0%} of the step"
    else:
        return
    caution = f"more activations are kept{_in_use(step)}"
    # Under "never" a stage keeps all micro-batches at most, under "except_last" one.
    for mode, count in ("never", step.chunks), ("except_last", 1):
        if {*step.modes} != {mode} and _has_room(step, count):
            yield Advice(reason, {"checkpoint": mode}, caution)


def _has_room(step: Observed, count: int) -> bool:
    """Whether so many micro-batches more may be kept on each device, as far as anybody knows."""
    more = Counter(step.step.memory)
    for j, device in enumerate(step.devices):
        more[str(device)] += round((count - 1) * step.kept.get(j, 0.0))
    return all(more[str(x)] <= USABLE * memory_total(x) for x in step.devices)


def _bubble(step: Observed) -> Iterator[Advice]:
    share, m = step.share("bubble"), step.chunks
    if share <= BUBBLE:
        return
    reason = f"devices wait {share:.0%} of the step, with {m} micro-batches"
    if 2 * m <= step.rows:
        yield Advice(reason, {"chunks": 2 * m})
    elif step.rows:
        yield Advice(reason, {}, remedy="call it once with the rows of several mini-batches")


def _in_use(step: Observed) -> str:
    """Say how much memory the fullest device has had in use."""
    memory = step.step.memory
    if not memory:
        return ""
    name = max(memory, key=memory.__getitem__)
    return f"; {name} has had {as_mib(memory[name])} MiB in use"
