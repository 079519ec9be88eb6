"""One step: what the courses of its micro-batches have in common."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.autocast import own_casts
from torchgpipe.ambient.backward import is_worth_a_visit
from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.autograd.ends import between
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.describe.figures import Figures
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    current_streams,
    has_streams,
    make_current,
    record_stream,
    set_streams,
    wait_all,
    wait_stream,
)
from torchgpipe.engine.body import Body
from torchgpipe.engine.recorded import Recording
from torchgpipe.engine.weights import Weights
from torchgpipe.mapped.attributes import Attributes
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.partition.lent import Lent
from torchgpipe.recompute.buffers import Learned
from torchgpipe.recompute.layers import LayersState

__all__: list[str] = []


class Stage(NamedTuple):
    """A visit of a device: the first one, or one of those after the model came back to it.

    Stages have numbers in the order in which the model comes to them.
    """

    number: int
    device: torch.device
    visit: int
    compute: AbstractStream
    lanes: tuple[AbstractStream, ...]

    @property
    def lead(self) -> int:
        """The number of micro-batches that this stage may be ahead of the one it sends to."""
        return len(self.lanes) - 1


class Lasting:
    """The parts that last from step to step: streams, locks, knowledge of buffers."""

    def __init__(self) -> None:
        #: The streams of the first visit of each device, and of those after it, in turns.
        self.pools = [StreamPool() for _ in range(4)]
        self.lock = threading.RLock()
        #: The thread that runs a step.
        self.thread: int | None = None
        self.learned: Learned = WeakKeyDictionary()
        #: The spans of steps, while somebody traces the model.
        self.recording: Recording | None = None
        #: The figures of the last step that was traced.
        self.figures: Figures | None = None


class MappedStep:
    """One step.

    Args:
        lasting: what lasts from step to step.
        known: the attributes of mapped modules that earlier steps have looked at. Calls of these
            modules refer to ``lasting``, and would never be free if it held the modules.
        devices: the devices of the map.
        m: the number of micro-batches.
        checkpointed: how many micro-batches, from the first, are computed under checkpointing.
    """

    def __init__(
        self,
        lasting: Lasting,
        known: dict[nn.Module, Attributes],
        devices: Sequence[torch.device],
        m: int,
        checkpointed: int,
    ) -> None:
        self._lasting, self._known, self._checkpointed = lasting, known, checkpointed
        #: Held where threads would change the same objects.
        self.lock = lasting.lock
        #: Takes the times of cells, while somebody traces the model.
        self.recording = lasting.recording
        if self.recording is not None:
            self.recording.begin_step()
        self.m = m
        #: The devices of the map, each once.
        self.devices = [*dict.fromkeys(devices)]
        self.numbers = StepNumbers(self.devices, m)
        #: Whether forks and joins are needed.
        self.fenced = torch.is_grad_enabled() and any(map(has_streams, self.devices))
        #: Whether the code between mapped modules is watched.
        self.needs_glue = len(self.devices) > 1 and any(map(has_streams, self.devices))
        #: The phonies of each cell, for cells that backward shall come to before it.
        self.phonies: dict[tuple[int, Stage], list[Tensor]] = {}
        #: The stages that each stage sends to.
        self.targets: dict[Stage, list[Stage]] = {}
        self._stages: dict[tuple[torch.device, int], Stage] = {}
        #: The modules that were computed in each stage.
        self.modules: dict[Stage, set[nn.Module]] = defaultdict(set)
        #: The devices of the outputs of the last micro-batch.
        self.places: list[torch.device] = []
        #: The stage in which each module was called last.
        self._last: dict[nn.Module, Stage] = {}
        self._bodies: dict[tuple[nn.Module, Stage], Body] = {}
        self._lent: dict[tuple[nn.Module, Stage], Lent] = {}
        self._attributes: dict[nn.Module, Attributes] = {}
        self._visited: dict[nn.Module, bool] = {}
        self._contexts: list[Context] = []
        self._outside = {device: current_stream(device) for device in self.devices}
        self._streams = current_streams(self.devices)
        self._weights: Weights | None = None
        self._lock = threading.Lock()
        #: Whether code has drawn random numbers on a device behind the cell that was on its way.
        self.drawn_behind = False

    def stage(self, device: torch.device, visit: int) -> Stage:
        """The stage of a visit."""
        with self._lock:
            return self._stages.get((device, visit)) or self._new_stage(device, visit)

    def _new_stage(self, device: torch.device, visit: int) -> Stage:
        pools = self._lasting.pools
        # A device has some streams only, and a model may come back to it any number of times.
        place = visit and 1 + (visit - 1) % (len(pools) - 1)
        # A pool gives each of several partitions a stream of its own to compute on.
        streams = pools[place].get(device, 2 if visit else 1, skips=False)[0]
        compute = streams.compute if visit else self._outside.get(device, streams.compute)
        found = Stage(len(self._stages), device, visit, compute, tuple(streams.values))
        self._stages[device, visit] = found
        # Between steps the caller changes gradients, whose memory belongs to these streams.
        caller = self._outside.get(device, streams.compute)
        others = {compute, *found.lanes} - {caller}
        if has_streams(device):
            wait_all(others, caller)
        return found

    def uncached(self, module: nn.Module, stage: Stage) -> AbstractContextManager[None]:
        """Leave autocast's cache alone for a module that an earlier visit has called, too.

        The cache has weights that were cast on the stream of one visit, and frees them at will.
        """
        shared = stage.visit and sum(module in modules for modules in [*self.modules.values()]) > 1
        # guard: weights that were cast
        return own_casts() if shared else nullcontext()

    def phonies_before(self, i: int, stage: Stage) -> list[Tensor]:
        """The phonies of the last micro-batch before ``i`` that came to a stage."""
        for k in reversed(range(i)):
            if (k, stage) in self.phonies:
                return self.phonies[k, stage]
        return []

    def enters(self, module: nn.Module, stage: Stage) -> None:
        """Order the calls of a module that a later visit of the device calls, too.

        It may change its buffers, which the streams of two visits must not do at the same time.
        """
        self.modules[stage].add(module)
        last = self._last.get(module)
        # guard: one visit at a time
        if last is not None and last is not stage and any(True for _ in module.buffers()):
            wait_stream(stage.compute, last.compute)
        self._last[module] = stage

    def goes(self, source: Stage, target: Stage) -> None:
        """Take note that one stage sends to another."""
        targets = self.targets.setdefault(source, [])
        if target not in targets:
            targets.append(target)

    def is_checkpointed(self, i: int) -> bool:
        """Whether a micro-batch is computed under checkpointing."""
        return i < self._checkpointed

    def body(self, mapped: Mapped, call: Any, stage: Stage) -> Body:
        """The body of a mapped module, for second runs.

        Each stage has one of its own, since second runs of a norm write to a copy of its statistics
        that the body keeps.
        """
        found = self._bodies.get((mapped.module, stage))
        if found is None:
            state = LayersState(mapped.module, self._lasting.learned)
            found = Body(mapped.module, self._lasting.lock, state, False)
            # The model has the arguments, too, so first runs of a layer that changes them in place
            # get no clone.
            found.in_place = False
            # Not the module, whose class may have a __call__ of its own, which has been called.
            found.call = call
            self._bodies[mapped.module, stage] = found
        return found

    def lending(self, mapped: Mapped, stage: Stage, inner: Callable[..., Any]) -> Any:
        """Call a mapped module with copies of the weights that are at home on other devices."""
        if mapped.lent is None:
            return inner
        with self._lock:
            if self._weights is None:
                streams = [self._lasting.pools[0].get(x, 1, skips=False) for x in self.devices]
                lanes = dict(zip(self.devices, [first.values[0] for first, *_ in streams]))
                self._weights = Weights(lanes, self._outside)
            lent = self._lent.get((mapped.module, stage))
            if lent is None:
                bring = partial(self._weights.bring, stage.compute, stage.lanes[0])
                lent = Lent(mapped.lent, bring, self.lock)
                self._lent[mapped.module, stage] = lent
        return partial(lent.call, inner)

    def is_visited(self, module: nn.Module) -> bool:
        """Whether calls of a module add notes to what its functions may raise in backward."""
        found = self._visited.get(module)
        if found is None:
            found = self._visited[module] = torch.is_grad_enabled() and is_worth_a_visit(module)
        return found

    def attributes(self, module: nn.Module) -> Attributes | None:
        """The attributes of a mapped module, for second runs, if there will be any."""
        if not self._checkpointed:
            return None
        found = self._attributes.get(module)
        if found is None:
            found = self._attributes[module] = self._known.get(module) or Attributes(module)
            self._known[module] = found
            found.begin_step()
        return found

    def new_context(self) -> Context:
        """The modes of this moment, for a second run."""
        context = Context()
        context.over = False
        self._contexts.append(context)
        return context

    def take_streams(self) -> None:
        """Make the caller's streams the current ones of another thread."""
        # guard: the caller's streams in a thread
        set_streams(self._streams)

    def leave_streams(self) -> None:
        """Make the caller's streams the current ones again, at the end of a micro-batch."""
        for device in {stage.device for stage in self._own()}:
            # guard: the caller's streams after a course
            make_current(self._outside[device])

    def have_caller_wait(self) -> None:
        """Make the caller's streams wait for those of later visits."""
        for stage in self._own():
            wait_stream(current_stream(stage.device), stage.compute)

    def back_to_caller(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Hand outputs over to the caller, whose backward begins, and ends, with its streams."""
        own = self._own()
        if own:
            for x in outputs:
                # guard: recording outputs of later visits
                record_stream(x, current_stream(x.device))
        if own and needs_backward(tuple(outputs)):
            outputs = between(self._wait_for_caller, self._end_backward, *outputs)
        return outputs

    def end(self) -> None:
        """Take note that all micro-batches were computed."""
        for body in self._bodies.values():
            if body.state is not None:
                body.state.settle()
                body.state.buffers.settle()
        for attributes in self._attributes.values():
            attributes.end_step(self.m)
        for context in self._contexts:
            context.over = True

    def fail(self) -> None:
        """Take note that no further micro-batch will be computed."""
        for attributes in self._attributes.values():
            attributes.let_go()

    @property
    def is_divisible(self) -> bool:
        """Whether another such step gives the same if several threads compute it.

        The numbers that code draws behind a cell would be those of another micro-batch. And where
        several stages change the buffers of a module, threads would take turns as they come.
        """
        stages = Counter(module for modules in self.modules.values() for module in modules)
        return not self.drawn_behind and not any(
            count > 1 and any(True for _ in module.buffers()) for module, count in stages.items()
        )

    def _own(self) -> list[Stage]:
        """The stages that compute on streams of their own."""
        # A list, since another thread may add stages.
        return [stage for stage in [*self._stages.values()] if stage.visit]

    def _wait_for_caller(self) -> None:
        for stage in self._own():
            wait_stream(stage.compute, current_stream(stage.device))

    @uncompiled
    def _end_backward(self) -> None:
        """Hand gradients over, whose memory belongs to streams of later visits."""
        self.have_caller_wait()
        for stage in self._own():
            for module in self.modules[stage]:
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        record_stream(parameter.grad, current_stream(stage.device))
