"""The layers of a traced model: what each takes of its partition, and hands on, and who waits.

Hooks around the forward of each layer take the times of two micro-batches in each step, and are
gone then until the next one: more times would tell little, and each hook takes a while on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import inf
from operator import itemgetter
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchgpipe.devices.recorder import Mark, Recorder, WorkTimes
from torchgpipe.devices.streams import current_stream
from torchgpipe.partition.keeping import Keeping, offload_of
from torchgpipe.recompute.runs import is_recomputing
from torchgpipe.schedule.costs import Costs
from torchgpipe.show.span import TRIPS, Span
from torchgpipe.values.structure import leaves_of

__all__: list[str] = []

#: The milliseconds by which the second time has to be late, and how many times as late as a quarter
#: of all are.
APART, TIMES = 0.005, 5


class Stray(NamedTuple):
    """A copy that a layer makes, with the other device, and when that was done with it, in ms."""

    layer: int
    device: torch.device
    end: float


class Strays:
    """The times of other devices around the layers of one micro-batch, to find stray copies.

    A stray copy is one between two accelerators that a layer makes by itself, as ``x.to(other)``
    does. PyTorch makes the current streams of both devices wait for each other then. So times are
    taken on the current streams of all other devices. Without such a copy nothing is between the
    two times of a stream, and the second one is when the first one is, or when the host issues it,
    if the device has nothing to do. With one, the layer goes on when the other stream does::

        own stream    ... start | waits           copy | computes   stop | ...
        other stream  ... work of other cells ... start copy stop | ...
    """

    def __init__(self, devices: Iterable[torch.device], recorder: Recorder) -> None:
        self._recorder = recorder
        self._devices = [*dict.fromkeys(devices)]
        #: For each layer, the times of each other device, and that of the host at its end.
        self._seen: dict[int, list[list[WorkTimes]]] = {}
        self._threads: set[int] = set()

    def clear(self) -> None:
        self._seen.clear()
        self._threads.clear()

    def before(self, layer: int, device: torch.device) -> None:
        self._threads.add(threading.get_ident())
        others = [x for x in self._devices if x != device]
        self._seen[layer] = [[self._recorder.before(current_stream(x))] for x in others]

    def after(self, layer: int) -> None:
        for each in self._seen[layer]:
            (times,) = each
            times.end()
            each.append(self._recorder.issued(times.stream.device))

    def found(self) -> Sequence[Stray]:
        """The copies, once the devices are done."""
        if len(self._threads) > 1:
            # What is between the times of a stream may be another thread's.
            return []
        found = []
        for layer, some in self._seen.items():
            # What raises has no time of the host.
            for times, issued in (x for x in some if len(x) == 2):
                start, stop = self._recorder.bounds(times)
                late = stop - max(start, *self._recorder.bounds(issued))
                found.append((late, Stray(layer, times.stream.device, stop)))
        delays = sorted(late for late, _ in found)
        least = max(APART, TIMES * delays[len(delays) // 4]) if delays else 0.0
        return [stray for late, stray in found if late > least]


#: The micro-batches of a step that are timed.
TIMED = 2


class Layers:
    """The layers of a model, each with its device, with hooks until :meth:`stop`."""

    def __init__(
        self, layers: Sequence[tuple[nn.Module, torch.device]], recorder: Recorder
    ) -> None:
        self._recorder = recorder
        self._found = layers
        self._times: dict[int, list[WorkTimes]] = {}
        self._bytes: dict[int, int] = {}
        self.rows = 0
        self._strays = Strays([device for _, device in layers], recorder)
        self._handles: dict[int, list[Any]] = {}
        # A hook cannot tell which of its places a layer is called at.
        if len({id(x) for x, _ in self._found}) == len(self._found):
            recorder.at_steps.append(self._start)

    def _start(self) -> None:
        """Have hooks anew. The last step counts."""
        self.stop()
        self._times.clear()
        self._bytes.clear()
        self._strays.clear()
        for k, (layer, device) in enumerate(self._found):
            before = partial(self._begin, k, device)
            self._handles[k] = [
                layer.register_forward_pre_hook(before, with_kwargs=True),
                layer.register_forward_hook(partial(self._end, k)),
            ]

    def stop(self, layers: Iterable[int] | None = None) -> None:
        """Take the hooks away, by default those of all layers."""
        for k in [*self._handles] if layers is None else layers:
            for handle in self._handles.pop(k, ()):
                handle.remove()

    @property
    def called(self) -> list[int]:
        """The layers in the order of their first calls."""
        return [*self._times]

    def found(self, order: Sequence[int] | None = None) -> list[TracedLayer]:
        """The layers in an order, once the devices are done; none if not all were timed."""
        order = range(len(self._found)) if order is None else order
        if not self._bytes.keys() >= {*order}:
            return []
        strays = self._strays.found()
        return [self._layer(k, [x for x in strays if x.layer == k]) for k in order]

    def _layer(self, k: int, strays: Sequence[Stray]) -> TracedLayer:
        bounds = [*map(self._recorder.bounds, self._times[k])]
        times = [stop - start for start, stop in bounds]
        if strays:
            # What is after the copy, in the micro-batch in which it was looked for, the first one.
            start, stop = bounds[0]
            times.append(max(0.0, stop - max(start, *(x.end for x in strays))))
        others = tuple([str(x.device) for x in strays])
        return TracedLayer(min(times), self._bytes[k], str(self._found[k][1]), others)

    def _begin(self, k: int, device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> None:
        if is_recomputing():
            return
        if k == 0:
            tensors = [x for x in leaves_of((args, kwargs)) if isinstance(x, Tensor)]
            self.rows = max([len(x) for x in tensors if x.dim()], default=0)
        times = self._times.setdefault(k, [])
        if not times:
            self._strays.before(k, device)
        times.append(self._recorder.before(current_stream(device)))

    def _end(self, k: int, _: nn.Module, input: Any, output: Any) -> None:
        if is_recomputing():
            return
        times = self._times[k]
        times[-1].end()
        if len(times) == 1:
            self._strays.after(k)
        if len(times) == TIMED:
            self.stop([k])
        self._bytes[k] = sum(x.nbytes for x in leaves_of(output) if isinstance(x, Tensor))


#: The milliseconds of work, at least, that a device has left when the host begins to wait.
LEFT = 0.005

#: The functions that may wait: those with a number, a list or a shape that depends on values.
NAMES = {"__bool__", "__complex__", "__contains__", "__float__", "__getitem__", "__index__"}
NAMES |= {"__int__", "__setitem__", "allclose", "argwhere", "bincount", "cpu", "equal"}
NAMES |= {"is_nonzero", "item", "masked_select", "nonzero", "numpy", "repeat_interleave", "to"}
NAMES |= {"tolist", "unique", "unique_consecutive"}


class Waits:
    """The waits of the first micro-batch of each stage, of the last step.

    A computation that runs while it is issued takes as long as the host does, and one that the host
    waits for takes the host as long as itself. Times around the cell cannot tell one from the
    other. So the functions that may wait are looked at: the host has waited in one if the device
    had work to do when the function was called, and none when it was done.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: The host's time before a call, the device's when it is done, and the host's after it.
        self._seen: dict[int, list[tuple[WorkTimes, WorkTimes, WorkTimes]]] = {}
        recorder.at_steps.append(self._seen.clear)

    def within(self, mark: Mark) -> Looking:
        """A mode that looks at the functions that the layers of a cell call."""
        return Looking(self._recorder, mark.stream.device, self._seen.setdefault(mark.stage, []))

    def found(self, ends: Mapping[int, float]) -> dict[int, HostWait]:
        """The waits by stage, once the devices are done, by the ends of their first forwards."""
        found: dict[int, HostWait] = {}
        for j, samples in self._seen.items():
            waited, last = 0.0, None
            for before, at, after in samples:
                start, end = (self._recorder.bounds(x)[0] for x in (before, after))
                until = self._recorder.bounds(at)[0]
                # What the device had to do then, and whether the host went on before it was done.
                if until > start + LEFT and until <= end + LEFT:
                    waited += end - start
                    last = end
            if last is not None and j in ends:
                found[j] = HostWait(waited, max(0.0, ends[j] - last))
        return found


class Looking(TorchFunctionMode):
    """The mode of one call of layers."""

    def __init__(self, recorder: Recorder, device: torch.device, seen: list[Any]) -> None:
        super().__init__()
        self._recorder, self._device, self._seen = recorder, device, seen

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in NAMES:
            return func(*args, **(kwargs or {}))
        before = self._recorder.issued(self._device)
        at = self._recorder.before(current_stream(self._device))
        result = func(*args, **(kwargs or {}))
        self._seen.append((before, at, self._recorder.issued(self._device)))
        return result


# From one step nobody can tell which part of a time belongs to each row, and which to each call. So
# the time of a device is taken to be in proportion to the rows, and the host's to be the same for
# any number of them. Where the host is late, a computation runs while it is issued, and takes as
# long as that. The device is taken to be busy half of this time.


#: The share of a step that the host holds up, from which on the least time of a computation counts,
#: and not the median: one that the host stretches takes longer.
LATE = 0.02
#: The share of the time to issue it from which on a computation runs while it is issued.
STRETCHED = 0.5

#: The kinds of times of a layer: computations, and the copies of what it keeps.
KINDS = (*"FIWR", *TRIPS)


@dataclass(frozen=True)
class TracedLayer:
    """The time of a layer's forward, in any unit, and the memory of its output."""

    forward: float
    bytes: int
    device: str = ""
    #: The other devices that it copies from, or to, by itself.
    copied: Sequence[str] = ()


@dataclass(frozen=True)
class HostWait:
    """The milliseconds that the host waits in a forward, and that the device goes on after that."""

    time: float
    #: After the last wait, before the cell ends.
    tail: float


@dataclass(frozen=True)
class Figures:
    """The times of the parts of a step, in milliseconds."""

    balance: tuple[int, ...]
    chunks: int
    #: The rows of the mini-batch; 0 if unknown.
    rows: int
    #: Of computations, and of a cell's copies to the host and back, by kind and partition.
    times: Mapping[tuple[str, int], float]
    #: Of a copy, by the partitions that it leads from and to.
    copies: Mapping[tuple[int, int], float]
    #: To issue each kind of computation.
    host: Mapping[tuple[str, int], float]
    #: All layers, in order; empty if they were not timed.
    layers: Sequence[TracedLayer]
    #: The stages whose forward makes the host wait.
    waits: Mapping[int, HostWait] = field(default_factory=dict)

    def costs(self, balance: Sequence[int], chunks: int, modes: Sequence[Keeping] = ()) -> Costs:
        """The costs of partitions of other sizes and modes, for micro-batches of other sizes."""
        scale = self.chunks / chunks
        ends = [*pairwise(accumulate(balance if self.layers else [1] * len(balance), initial=0))]
        each: dict[str, Any] = {
            kind: [scale * sum(x[kind] for x in self._each[a:b]) for a, b in ends] for kind in KINDS
        }
        offloads = [offload_of(x) for x in modes]
        away = [float(x is not None and bool(each["out"][j])) for j, x in enumerate(offloads)]
        each |= {"activation": away, "away": away} if any(away) else {"out": 0, "back": 0}
        each["ahead"] = [x.ahead if x else 1 for x in offloads] or 1
        copy = {
            (j, k): scale * time * self._bytes(balance, min(j, k))
            for (j, k), time in self.copies.items()
        }
        return Costs(**each, copy=copy)

    @property
    def without_strays(self) -> Figures:
        """The figures without the copies that layers make by themselves."""
        times = dict(self.times)
        for j, own in enumerate(self._by_partition):
            forward = sum(x.forward for x in own) if any(x.copied for x in own) else inf
            times |= {x: min(times[x], forward) for x in (("F", j), ("R", j)) if x in times}
        return replace(self, times=times)

    @property
    def layer_times(self) -> list[float]:
        """The time of each layer, forward and backward, of a micro-batch; none if not timed."""
        return [x["F"] + x["I"] + x["W"] for x in self._each] if self.layers else []

    @cached_property
    def _by_partition(self) -> list[Sequence[TracedLayer]]:
        return [self.layers[a:b] for a, b in pairwise(accumulate(self.balance, initial=0))]

    @cached_property
    def _each(self) -> list[dict[str, float]]:
        """The times of each layer, or of each partition, if its layers were not timed."""
        found = []
        for j, own in enumerate(self._by_partition):
            whole = sum(x.forward for x in own)
            shares = [x.forward / whole if whole else 1 / len(own) for x in own] or [1.0]
            found += [{kind: x * self._time(kind, j) for kind in KINDS} for x in shares]
        return found

    def _time(self, kind: str, j: int) -> float:
        """The time of a kind of computation, which may not have been among those of the step."""
        if (kind, j) in self.times or kind in TRIPS:
            return self.times.get((kind, j), 0.0)
        if kind == "R":
            return self._time("F", j)
        # No gradient of the input of the first partition is needed.
        share = 0.5 if j else float(kind == "W")
        return share * self.times.get(("B", j), 0.0)

    def _bytes(self, balance: Sequence[int], j: int) -> float:
        """The output of a partition, as a multiple of what it was."""
        if tuple(balance) == self.balance:
            return 1.0
        before = self.layers[sum(self.balance[: j + 1]) - 1].bytes
        return self.layers[sum(balance[: j + 1]) - 1].bytes / before if before else 1.0


def thread_of(
    by_autograd: bool, w: int | None, kind: str, i: int | None = 0, threads: int = 1
) -> Hashable:
    """Name the thread that issues a computation: for a backward under autograd, the worker's."""
    return w if by_autograd and kind != "F" else ("caller", (i or 0) % threads)


def figures_of(
    spans: Sequence[Span],
    balance: Sequence[int],
    by_autograd: bool,
    layers: Sequence[TracedLayer],
    rows: int,
    late: float,
    waits: Mapping[int, HostWait] = {},
    threads: int = 1,
) -> Figures:
    """Take the figures of the spans of a step, whose micro-batches have so many rows.

    Autograd's threads may issue the backward, and several threads the forward. The host is late for
    a share of the step.
    """
    computed = [x for x in spans if x.computes]
    copied = [x for x in spans if x.kind in TRIPS]
    # A backward that waits for its cell takes longer than that of a cell that has stayed.
    middle: Middle = min if late > LATE or copied else median
    chunks = 1 + max(x.microbatch or 0 for x in computed)
    host = _host(computed, by_autograd, waits, threads)
    times = _by(middle, (((x.kind, x.stage), x.time) for x in (*computed, *copied)))
    if late > LATE:
        # What takes much longer than the host does is not held up by it.
        spent = {x: time / (host.get(x) or inf) for x, time in times.items() if x in host}
        stretched = [x for x, share in spent.items() if STRETCHED <= share <= 1 / STRETCHED]
        times |= {x: times[x] / 2 for x in stretched}
    return Figures(
        tuple(balance),
        chunks,
        rows * chunks,
        times,
        _by(median, (((x.stage, x.target), x.time) for x in spans if x.kind == "copy")),
        host,
        layers,
        waits,
    )


Middle: TypeAlias = Callable[[list[float]], float]


def _by(middle: Middle, pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Make one number of all that have the same key."""
    groups: dict[Any, list[float]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return {key: float(middle(some)) for key, some in groups.items()}


def _host(
    computed: Sequence[Span], by_autograd: bool, waits: Mapping[int, HostWait], threads: int
) -> dict[tuple[str, int], float]:
    """The time to issue each kind of computation: from its issue to the next one of the thread."""
    lines: dict[Any, list[tuple[float, Span]]] = {}
    for x in computed:
        if x.issued is None:
            return {}
        # Under autograd each partition is a worker of its own.
        thread = thread_of(by_autograd, x.stage, x.kind, x.microbatch, threads)
        lines.setdefault(thread, []).append((x.issued, x))
    pairs: list[tuple[Any, float]] = []
    # A thread may have waited for something else in between.
    for line in lines.values():
        line.sort(key=itemgetter(0))
        for (at, x), (after, _) in pairwise(line):
            wait = waits.get(-1 if x.stage is None else x.stage) if x.kind == "F" else None
            # The wait of the first micro-batch alone is known.
            if wait is None or not x.microbatch:
                pairs.append(((x.kind, x.stage), max(0.0, after - at - (wait.time if wait else 0))))
    return _by(min, pairs)
