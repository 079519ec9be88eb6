"""One step: what the courses of its micro-batches have in common."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe._torch.attributes import modules_of
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.context import Context
from torchgpipe.ambient.random_numbers import StepNumbers
from torchgpipe.autograd.fork_join import needs_backward
from torchgpipe.autograd.nodes import between
from torchgpipe.devices.pool import StreamPool
from torchgpipe.devices.streams import (
    AbstractStream,
    current_stream,
    current_streams,
    has_streams,
    make_current,
    record_all,
    record_stream,
    set_streams,
    wait_all,
    wait_stream,
)
from torchgpipe.engine.recorded import Recording
from torchgpipe.engine.step import Fence, StepWeights
from torchgpipe.mapped.body import MappedBody
from torchgpipe.mapped.device_map import Mapped
from torchgpipe.mapped.exchanged import HeldValues
from torchgpipe.mapped.foreign import Met, may_meet
from torchgpipe.mapped.lazy_outputs import Omitted
from torchgpipe.partition.keeping import (
    Keeping,
    Offload,
    checkpointed,
    offload_of,
    policy_of,
    recomputed_by,
)
from torchgpipe.partition.placement import Lent, TableEntry
from torchgpipe.recompute.buffers import Learned
from torchgpipe.recompute.layer_state import LayersState
from torchgpipe.recompute.offload import Offloading
from torchgpipe.schedule.trips import leaving
from torchgpipe.show.figures import StepFigures
from torchgpipe.values.structure import is_dense

__all__: list[str] = []


@dataclass(eq=False)
class DeviceVisit:
    """A visit of a device: the first one, or one of those after the model came back to it.

    Stages have numbers in the order in which the model comes to them.
    """

    number: int
    device: torch.device
    visit: int
    compute: AbstractStream
    lanes: tuple[AbstractStream, ...]
    #: For each offloading mode in this stage: what moves saved tensors of modules to the host.
    offloadings: dict[Offload, Offloading] = field(default_factory=dict)
    bodies: dict[nn.Module, MappedBody] = field(default_factory=dict)

    def lead_of(self, target: DeviceVisit) -> range:
        """Tell the fence how far a stage that this one sends to may be ahead of it in backward.

        The numbers of stages tell little of their order in time, so there is no shorter lead.
        """
        lead = len(self.lanes) - 1
        # guard: lead of a course
        return range(max(lead, target.number - self.number + 1), lead + 1)


class Lasting:
    """The parts that last from step to step: streams, locks, knowledge of buffers."""

    def __init__(self) -> None:
        #: A pool for the first visit of each device, and others that further visits use in turn.
        self.pools = [StreamPool() for _ in range(4)]
        self.lock = threading.RLock()
        #: The identifier of the thread that called the wrapper, while a step runs; None between
        #: steps. During a step, ``Call`` refuses calls in a thread that runs no micro-batch.
        self.thread: int | None = None
        self.learned: Learned = weakref.WeakKeyDictionary()
        #: The name of the mapped module that the latest micro-batch called last; None before the
        #: first one. A checkpoint of this module also recomputes the tail, the code after it.
        self.last: str | None = None
        #: The recording of the times of cells while somebody traces the model; None otherwise.
        self.recording: Recording | None = None
        #: Whether a step has recorded gradients: only the first such step has ``MappedStep.held``.
        self.trained = False
        #: Which modules have so far used tensors of other devices that were not their arguments.
        self.met: Met = {}
        #: Whether a module has names on several devices of the map: see ``Mapped.called()``.
        self.has_names = False
        #: The figures of the last step that was traced; None if none was.
        self.figures: StepFigures | None = None


class MappedStep:
    """One step."""

    def __init__(
        self,
        lasting: Lasting,
        devices: Sequence[torch.device],
        model: nn.Module,
        m: int,
        modes: Mapping[str, Keeping],
        output_device: torch.device | None = None,
    ) -> None:
        self.lasting, self._modes = lasting, modes
        self.recording = lasting.recording
        if self.recording is not None:
            self.recording.begin_step()
        self.m, self.output_device = m, output_device
        self.devices = [*dict.fromkeys(devices)]
        self.numbers = StepNumbers(self.devices, m)
        #: The outputs that are computed only when the caller reads them.
        self.omitted = Omitted()
        #: In the first training step, the attributes of modules, to verify that nothing but the
        #: modules themselves sets them; None in all other steps.
        self.held: HeldValues | None = None
        if torch.is_grad_enabled() and not lasting.trained:
            self.held = HeldValues()
        #: What keeps backward in the reverse order of forward; None without streams or gradients.
        self.fence: Fence | None = None
        if torch.is_grad_enabled() and any(map(has_streams, self.devices)):
            self.fence = Fence(defaultdict(dict))
        #: Whether the map has several devices, and any has streams, so that micro-batches overlap.
        self.is_spread = len(self.devices) > 1 and any(map(has_streams, self.devices))
        #: Whether ``Glue``, a torch-function mode, watches the model's code between mapped modules:
        #: to bring tensors to other devices, or to note down code that is recomputed.
        self.needs_glue = self.is_spread or any(
            checkpointed(recomputed_by(x), m) for x in {*modes.values()}
        )
        self._stages: dict[tuple[torch.device, int], DeviceVisit] = {}
        # A weak reference: the graph of a step may hold this object, and must not hold the model.
        self._model = weakref.ref(model)
        #: The storage addresses of parameters and buffers; None until ``has_state()`` needs them.
        self._state: set[int] | None = None
        #: The device of each output tensor of the previous micro-batch. The next micro-batch copies
        #: its output there, too, since outputs are joined.
        self.places: list[torch.device] = []
        #: Whether the model has come back to a device, so that two stages may call the same layer.
        self._comes_back = False
        #: Whether two stages have called the same layer with buffers. If so, ``is_divisible`` is
        #: false, since several threads might change the buffers in another order.
        self._depends = False
        #: For each layer with buffers, the stage that called it last. The stream of the next stage
        #: that calls the layer waits for the stream of this one.
        self._last: dict[nn.Module, DeviceVisit] = {}
        self._weights: StepWeights | None = None
        self._contexts: list[Context] = []
        self._outside = {device: current_stream(device) for device in self.devices}
        self._streams = current_streams(self.devices)
        self._lock = threading.Lock()
        #: Whether code has drawn random numbers on a device while its course was on another one. If
        #: so, ``is_divisible`` is false, since several threads might draw other numbers.
        self.drawn_behind = False

    def stage(self, device: torch.device, visit: int) -> DeviceVisit:
        """The stage of a visit."""
        with self._lock:
            return self._stages.get((device, visit)) or self._new_stage(device, visit)

    def _new_stage(self, device: torch.device, visit: int) -> DeviceVisit:
        pools = self.lasting.pools
        # Pools after the first serve later visits in turn: a device has few streams in all.
        pool = visit and 1 + (visit - 1) % (len(pools) - 1)
        # For one partition, a pool gives the caller's compute stream: a later visit asks for two.
        streams = pools[pool].get(device, 2 if visit else 1, skips=False)[0]
        compute = streams.compute if visit else self._outside.get(device, streams.compute)
        number = len(self._stages)
        stage = DeviceVisit(number, device, visit, compute, tuple(streams.values))
        if visit and not self._comes_back:
            self._comes_back = True
            for earlier in self._stages.values():
                for body in earlier.bodies.values():
                    self._take_turns(earlier, body)
        self._stages[device, visit] = stage
        # The caller may have changed gradients whose memory belongs to other streams of this stage.
        # So these streams wait for the caller's.
        caller = self._outside.get(device, streams.compute)
        others = {compute, *stage.lanes} - {caller}
        if has_streams(device):
            wait_all(others, caller)
        return stage

    def has_state(self, tensors: Iterable[Tensor]) -> bool:
        """Whether state of the model is among tensors, or views of it."""
        # A tensor with a ``grad_fn`` is a result of autograd, and no parameter or buffer.
        tensors = [x for x in tensors if x.grad_fn is None and is_dense(x)]
        if tensors and self._state is None:
            model = self._model()
            state = [] if model is None else [*model.parameters(), *model.buffers()]
            # All empty tensors have the address 0, so it tells nothing.
            self._state = {_storage(x) for x in state if is_dense(x)} - {0}
        return any(_storage(x) in (self._state or ()) for x in tensors)

    def body(
        self, stage: DeviceVisit, mapped: Mapped, module: nn.Module, inner: Callable[..., Any]
    ) -> MappedBody:
        """The body of a mapped module that is called in a stage, by its own call."""
        body = stage.bodies.get(module) or self._new_body(stage, mapped, module, inner)
        if self._comes_back:
            self._take_turns(stage, body)
        return body

    def _take_turns(self, stage: DeviceVisit, body: MappedBody) -> None:
        """Keep two visits from changing the buffers of a layer at the same time."""
        if body.buffered is None:
            body.buffered = [x for x in modules_of(body.layers) if x._buffers]
        for layer in body.buffered:
            last, self._last[layer] = self._last.get(layer, stage), stage
            # guard: one visit at a time
            if last is not stage:
                self._depends = True
                wait_stream(stage.compute, last.compute)
                _record(layer, stage)

    def _new_body(
        self, stage: DeviceVisit, mapped: Mapped, module: nn.Module, inner: Callable[..., Any]
    ) -> MappedBody:
        mode = self._modes.get(mapped.key, "never")
        count = checkpointed(recomputed_by(mode), self.m)
        others = [x.bodies[module] for x in [*self._stages.values()] if module in x.bodies]
        state = LayersState(module, self.lasting.learned) if count else None
        if mapped.lent is not None:
            inner = partial(self._lent(stage, mapped.lent).call, inner)
        body = MappedBody(module, inner, self.lasting.lock, state, mapped.name)
        body.checkpointed, body.omits = count, mode == "always"
        body.policy = policy_of(mode)
        body.foreign = len(self.devices) > 1 and may_meet(self.lasting.met, mapped)
        body.offloading = self._offloading(stage, offload_of(mode))
        stage.bodies[module] = body
        if stage.visit:
            _record(module, stage)
        for x in (body, *others) if others else ():
            x.shared = True
        return body

    @property
    def _bodies(self) -> list[MappedBody]:
        return [body for stage in self._stages.values() for body in stage.bodies.values()]

    def _offloading(self, stage: DeviceVisit, offload: Offload | None) -> Offloading | None:
        """The offloading of a stage, which modules of one mode have in common."""
        if offload is None or not has_streams(stage.device):
            return None
        if offload not in stage.offloadings:
            memory = self.lasting.pools[0].host(stage.device)
            recorder = None if self.recording is None else self.recording.recorder
            offloading = Offloading(memory, offload, stage.number, leaving(self.m), recorder)
            stage.offloadings[offload] = offloading
        return stage.offloadings[offload]

    def _lent(self, stage: DeviceVisit, places: Sequence[TableEntry]) -> Lent:
        """The copies, on a stage's device, of weights that modules on several devices share."""
        if self._weights is None:
            streams = [self.lasting.pools[0].get(x, 1, skips=False) for x in self.devices]
            lanes = dict(zip(self.devices, [first.values[0] for first, *_ in streams]))
            self._weights = StepWeights(lanes, self._outside)
        bring = partial(self._weights.bring, stage.compute, stage.lanes[0])
        return Lent(places, bring, self.lasting.lock)

    def new_context(self) -> Context:
        """Capture the present modes, for recomputation."""
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
        for device in {stage.device for stage in self._later_stages()}:
            # guard: the caller's streams after a course
            make_current(self._outside[device])

    def have_caller_wait(self) -> None:
        """Make the caller's streams wait for those of later visits."""
        for stage in self._later_stages():
            wait_stream(current_stream(stage.device), stage.compute)

    def back_to_caller(self, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Hand outputs over to the caller, whose backward begins, and ends, with its streams."""
        stages = self._later_stages()
        if stages:
            for x in outputs:
                # guard: recording outputs of later visits
                record_stream(x, current_stream(x.device))
        if stages and needs_backward(outputs):
            outputs = between(self._wait_for_caller, self._end_backward, *outputs)
        return outputs

    def end(self) -> None:
        """Take note that all micro-batches were computed."""
        self.lasting.trained |= torch.is_grad_enabled()
        for body in self._bodies:
            body.end_forward()
        for context in self._contexts:
            context.over = True

    @property
    def is_divisible(self) -> bool:
        """Whether several threads would compute the same in such a step.

        Code that draws on another device than that of its cell would use the RNG state of another
        micro-batch. And if several stages change buffers, the order of these changes would depend
        on the timing of the threads.
        """
        return not (self.drawn_behind or self._depends)

    def _later_stages(self) -> list[DeviceVisit]:
        # A copy of the values, since another thread may add a stage to the dict.
        return [stage for stage in [*self._stages.values()] if stage.visit]

    def _wait_for_caller(self) -> None:
        for stage in self._later_stages():
            wait_stream(stage.compute, current_stream(stage.device))

    @uncompiled
    def _end_backward(self) -> None:
        """Hand gradients over, whose memory belongs to streams of later visits."""
        self.have_caller_wait()
        for stage in self._later_stages():
            caller = current_stream(stage.device)
            for module in stage.bodies:
                record_all([x.grad for x in module.parameters()], caller)


def _record(module: nn.Module, stage: DeviceVisit) -> None:
    """Keep what a module may replace from being reused before the stage is done with it."""
    for x in (*module.buffers(), *module.parameters()):
        # guard: recording what a visit may replace
        record_stream(x, stage.compute)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
