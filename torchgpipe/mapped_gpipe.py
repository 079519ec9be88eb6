"""The wrapper of any module, which makes it train over several devices by a device map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from threading import get_ident
from typing import Any

import torch
from torch import nn

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.generators import holding
from torchgpipe.autograd.nodes import drain_after_failure
from torchgpipe.batchnorm import defer
from torchgpipe.checks import checked_flag
from torchgpipe.devices.streams import Device, has_streams
from torchgpipe.engine.unchanged import unchanged
from torchgpipe.engine.wrapper import MiniBatch, Wrapper, begin_mini_batch, compute
from torchgpipe.mapped.body import current
from torchgpipe.mapped.calls import Call, Signed, intercept, let_go, signed, verify_calls
from torchgpipe.mapped.course import Course
from torchgpipe.mapped.device_map import checked_map, mapped_modules, parts_of, place
from torchgpipe.mapped.glue import Glue
from torchgpipe.mapped.hugging_face import (
    bring_adapters_home,
    map_of_accelerate,
    takes_cache,
    verify_trainer,
    without_cache,
    without_cache_of,
)
from torchgpipe.mapped.inputs import CallersTensors, Near, on_device, own_versions
from torchgpipe.mapped.slice_lengths import Slices, checked_slices
from torchgpipe.mapped.sliced_call import Slicing
from torchgpipe.mapped.step import Lasting, MappedStep
from torchgpipe.mapped.threads import Threads, Turns
from torchgpipe.partition.arguments import checked_device, checked_threads
from torchgpipe.partition.keeping import Keeping, keepings_of, words_of
from torchgpipe.planner.given import Memory
from torchgpipe.planner.maps import chosen_map, try_backward
from torchgpipe.show.describe import Description
from torchgpipe.values.microbatch import VALUE, Batch
from torchgpipe.values.order import Order
from torchgpipe.values.structure import Arguments, map_leaves

__all__ = ["MappedGPipe"]


class MappedGPipe(Wrapper):
    """Train any module by pipeline parallelism, by a map of its submodules to devices.

    ::

        model = AutoModelForCausalLM.from_config(config)
        pipe = MappedGPipe(model, {"model.embed_tokens": 0, ..., "lm_head": 3}, chunks=8)
        output = pipe(**batch)
        loss_of(pipe, output, batch).backward()

    The model's own forward is called for each micro-batch. Each module of the map is computed on
    its device, where its arguments come by themselves (:doc:`device_map`).

    Args:
        module: the model. Its modules are moved to their devices, not copied.
        device_map: devices by the names of modules, of which the longest one counts; ``""`` is the
            model itself. ``"auto"`` measures the model with the sample, and spreads its blocks
            evenly. Without a map it is that of ``from_pretrained(..., device_map="balanced")``.
        chunks: how many micro-batches to make of a mini-batch.
        checkpoint: as in :class:`GPipe`; a list has one mode for each entry of the map.
        threads: how many threads compute forward, more than one if the host waits for values, as
            ``.item()`` does.
        slices: how many to make of a sequence, lengths, or ``"auto"`` (:doc:`long_sequences`).
        deferred_batch_norm: as in :class:`GPipe`.
        output_device: where outputs go to; by default they stay where the model has them.
        sample: for ``"auto"``: an input, a tuple, or a dict, with the rows of a micro-batch.
        devices: for ``"auto"``: the devices, by default all accelerators.
        memory: for ``"auto"``: the bytes that a device may use, as ``{0: "10GiB", 1: 8e9}``.

    ``chunks`` to ``slices`` may be changed between steps. Errors say what to pass instead.
    """

    _own = (
        *(*Wrapper._own, "_lasting", "_workers"),
        *("_calls", "_mapped", "_around", "_takes_cache", "_signed"),
    )
    module: nn.Module
    _calls: list[Call]

    def __init__(
        self,
        module: nn.Module,
        device_map: Mapping[str, Device] | str | None = None,
        *,
        chunks: int = 1,
        checkpoint: Keeping | Sequence[Keeping] = "except_last",
        threads: int = 1,
        slices: Slices = 1,
        deferred_batch_norm: bool = False,
        output_device: Device | None = None,
        sample: Any = None,
        devices: Iterable[Device] | None = None,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"a device map is for a module (module: {type(module).__name__}); pass an nn.Module"
            )
        if device_map is sample is devices is memory is None:
            device_map = map_of_accelerate(module)
        # Set first, since _set() checks that there is a checkpoint mode for each entry of a map.
        self._map: Any = device_map if isinstance(device_map, Mapping) else None
        self._set(module, chunks, checkpoint)
        self.threads = threads
        self._slicing = Slicing(slices)
        self._output_device = None if output_device is None else checked_device(output_device)
        self.__dict__["module"] = module
        chosen = chosen_map(
            *(module, device_map, sample, devices),
            memory=memory,
            chunks=self.chunks,
            checkpoint=keepings_of(self._checkpoint, 1)[0],
            rehearse=self._rehearse,
        )
        self._place(chosen)
        if checked_flag(deferred_batch_norm, "deferred_batch_norm"):
            defer(module)
        self._wrapped("MappedGPipe")

    def _place(self, device_map: Mapping[str, Device]) -> None:
        self._map = checked_map(device_map, self.module)
        place(self.module, self._map)

    def _rehearse(self, device_map: Mapping[str, Device], arguments: Arguments) -> None:
        """Train with a sample as one micro-batch, by a map that was measured."""
        self._place(device_map)
        self._prepare()
        try:
            with unchanged(self.module), torch.inference_mode(False), torch.enable_grad():
                batches, devices = [Batch(arguments)], [*self._map.values()]
                inputs = [x.clone() for x in Near(devices[0]).all_of(*batches[0])]
                batches[0] = batches[0].replace(inputs)
                step = MappedStep(self._lasting, devices, self.module, 1, {})
                run = partial(self._run, step, batches, Order(self.module))
                compute(partial(holding, step.numbers.locks, run), self, [])
                try_backward(self.module, batches)
        finally:
            for call in self._calls:
                let_go(call)

    def _prepare(self) -> None:
        # The wrapper has the model's own tables of modules and tensors, so names have no prefix.
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[table] = self.module.__dict__[table]
        super()._prepare()
        self._lasting = Lasting()
        self._workers = Threads()
        is_spread = len({*self._map.values()}) > 1
        self._calls = [
            intercept(mapped, self._lasting, is_spread=is_spread)
            for mapped in mapped_modules(self.module, self._map)
        ]
        self._mapped = {call.mapped.module for call in self._calls}
        #: The modules that contain mapped modules, with their names. None of them may be compiled:
        #: compiled code would not call mapped modules through the wrapper.
        self._around = [
            (name, module)
            for name, module in self.module.named_modules()
            if module not in self._mapped and not self._mapped.isdisjoint(module.modules())
        ]
        self._takes_cache = takes_cache(self.module)
        self._signed = signed(MappedGPipe.forward, self.module.forward)

    @property
    def device_map(self) -> dict[str, torch.device]:
        """The devices by the names of modules."""
        return dict(self._map)

    #: The device map by the name that Trainers of Hugging Face look for. They do not move a model
    #: that has this attribute.
    hf_device_map = device_map

    @property
    def _partition_count(self) -> int | None:
        return None if self._map is None else len(self._map)

    @property
    def _layers(self) -> list[nn.Module]:
        return [self.module]

    @property
    def threads(self) -> int:
        """The number of threads that compute micro-batches at the same time."""
        return self._threads

    @threads.setter
    def threads(self, threads: int) -> None:
        self._threads = checked_threads(threads)

    @property
    def slices(self) -> Slices:
        """The number of slices that the sequence of a micro-batch is divided into, or lengths."""
        return self._slicing.slices

    @slices.setter
    def slices(self, slices: Slices) -> None:
        self._slicing.slices = checked_slices(slices)

    def describe(self) -> Description:
        """Describe the devices in a table: modules, sizes, mode, and slices of the last step."""
        modes, figures = words_of(self.checkpoint, len(self._map)), self._lasting.figures
        parts = parts_of(self.module, self._map, [x.mapped for x in self._calls], modes)
        return Description.of(parts, self.chunks, figures=figures, slices=self._slicing.words)

    def extra_repr(self) -> str:
        text = super().extra_repr()
        return text if self.slices == 1 else f"{text}, slices={self.slices!r}"

    def __getattr__(self, name: str) -> Any:
        """An attribute of the model, such as its ``config``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Not for special methods: the model's __deepcopy__ would copy the model alone.
            if "module" not in self.__dict__ or name.startswith("__"):
                raise
        attribute = getattr(self.module, name)
        return partial(self._merged, attribute) if name == "merge_and_unload" else attribute

    def _merged(self, merge: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Merge the adapters of a model of PEFT, whose modules are replaced by others then."""
        bring_adapters_home(self.module)
        merged = merge(*args, **kwargs)
        if self._calls:
            self._prepare()
        return merged

    def unwrap(self, device: Device | None = None) -> nn.Module:
        """Give the plain model back, on one device or as it is spread; the wrapper ends."""
        places = {*self._map.values()} if device is None else {checked_device(device)}
        for call in self._calls:
            let_go(call, is_spread=len(places) > 1)
        self._calls = []
        # The plain model merges adapters without bringing them to their weights' device: do so now.
        bring_adapters_home(self.module)
        if device is not None:
            for module in self.module.modules():
                # By this attribute, Trainers would take the model for one on several devices.
                vars(module).pop("hf_device_map", None)
            place(self.module, {"": places.pop()})
        return self.module

    def _traced(self) -> tuple[Lasting, list[torch.device]]:
        return self._lasting, [*dict.fromkeys(self._map.values())]

    def train(self, mode: bool = True) -> MappedGPipe:
        """Switch training mode of the model on or off, as :meth:`nn.Module.train` does."""
        self.training = mode
        self.module.train(mode)
        return self

    @Signed
    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, micro-batch by micro-batch (:doc:`inputs`).

        Tensors are split along dimension 0, and outputs are joined. What has no dimension, as a
        loss, comes out once per micro-batch, of shape ``(m,)`` (:doc:`losses`).
        """
        if self.slices != 1:
            return self._slicing.call(self, self._forward, Arguments(args, kwargs))
        if self._takes_cache:
            kwargs = without_cache(kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        mini_batch = MiniBatch(self, Arguments(args, kwargs))
        m, batches, devices = mini_batch.m, mini_batch.batches, [*self._map.values()]
        if torch.is_grad_enabled():
            verify_trainer()
        callers_tensors = None
        if all(x.device.type == "cpu" for batch in batches for x in batch):
            mini_batch.map(Near(devices[0]).all_of)
        if m > 1:
            callers_tensors = CallersTensors(mini_batch.flat) if torch.is_grad_enabled() else None
            # A model may change its rows of an input in place. Each micro-batch gets version
            # counters of its own, so that autograd does not take the rows of others for changed.
            mini_batch.map(partial(own_versions, {id(x) for x in mini_batch.whole}))
        output_device = self._output_device
        # The host waits for copies to the CPU, so these come after all micro-batches were issued.
        late = output_device is not None and not has_streams(output_device)
        begin_mini_batch(self)
        step = MappedStep(
            *(self._lasting, devices, self.module, m),
            dict(zip(self._map, mini_batch.modes)),
            None if late else output_device,
        )
        order = Order(self.module)
        run = partial(self._run, step, mini_batch.batches, order)
        mini_batch.compute(partial(holding, step.numbers.locks, run))
        omitted = step.omitted
        # Deleting ``step.omitted`` prevents a reference cycle: omitted outputs refer to the graph,
        # and the graph refers to the step if the model came back to a device.
        # guard: letting go of what is omitted
        del step.omitted
        omitted.take(mini_batch.batches, joins=not mini_batch.division.is_ready)
        output = mini_batch.joined(order.blocks)
        if callers_tensors:
            callers_tensors.watch(output)
        if late:
            output = map_leaves(partial(on_device, output_device), output)
        return omitted.put(output, output_device)

    def _run(self, step: MappedStep, batches: list[Batch], order: Order) -> None:
        def course(i: int, turns: Turns | None = None) -> None:
            # The first step, which has one thread, shows whether output rows can be joined. So
            # steps of several threads need not look at the order of rows.
            known, number = order if turns is None and i < 2 else None, self._slicing.number(i)
            batches[i] = self._course(step, number, batches[i].take(), turns, known)

        with step.numbers:
            self._lasting.thread = get_ident()
            try:
                # A trace reports what run() finds out: whether several threads compute the same.
                if self.threads > 1 or self._lasting.recording is not None:
                    self._workers.run(step, self.module, self.threads, course)
                else:
                    for i in range(step.m):
                        course(i)
                if step.held is not None:
                    # Calls verify what calls before them left. This is for the last calls.
                    step.held.verify()
            finally:
                self._lasting.thread = None
                step.have_caller_wait()
                # Free these, since the graph keeps the step if the model came back to a device.
                step.fence = step.held = None
        outputs = iter(step.back_to_caller([x for batch in batches for x in batch]))
        batches[:] = [batch.replace([next(outputs) for _ in batch]) for batch in batches]
        step.end()
        if any(device.type == "cpu" for device in self._map.values()):
            drain_after_failure(batches[-1])

    def _course(
        self, step: MappedStep, i: int, batch: Batch, turns: Turns | None, order: Order | None
    ) -> Batch:
        course = Course(step, i, turns)
        glue = course.glue = Glue(course) if step.needs_glue else None
        outer, current.course = current.course, course
        inputs, value = batch.parts[VALUE], batch.take().value
        try:
            with order.begin(inputs) if order else nullcontext(), glue or nullcontext():
                output = course.calling(self.module)(*value.args, **value.kwargs)
            if self._takes_cache and (self.slices != 1 or not value.kwargs["use_cache"]):
                output = without_cache_of(output)
            if order:
                order.end(inputs, Batch(output).parts[VALUE])
            return course.end(output)
        except BaseException as error:
            course.note(error)
            raise
        finally:
            course.close()
            step.leave_streams()
            current.course = outer

    def verify(self, batch: Mapping[str, Any]) -> str:
        """Find out what makes the loss of a batch of the losses of its rows, by two rows.

        It is ``"labels"``, ``"shifted labels"``, ``"tokens"``, ``"shifted tokens"``, ``"rows"`` or
        ``"sum"``, and :func:`~torchgpipe.transformers.loss_of` counts by it from then on. If no way
        makes the loss, it is a :exc:`ValueError` (:doc:`losses`).
        """
        return str(import_module("torchgpipe.transformers.proof").verify(self, batch))

    def _verify(self) -> None:
        verify_calls(self.module, self._calls, self._around, {*self._map.values()})


def judged(model: MappedGPipe) -> tuple[list[Call], Threads]:
    """The calls of mapped modules, and the threads, for what judges a wrapper from outside."""
    return model._calls, model._workers
