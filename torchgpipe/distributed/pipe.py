"""The wrapper, which makes an :class:`nn.Sequential` train over several processes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe import _torch
from torchgpipe._torch import pipelining
from torchgpipe._torch.attributes import modules_of
from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.modes import is_within_float16, verify_no_transform
from torchgpipe.ambient.notes import warn
from torchgpipe.batchnorm import defer
from torchgpipe.checks import checked_flag
from torchgpipe.devices.streams import Device, current_device
from torchgpipe.distributed.agreement import (
    Agreed,
    Agreement,
    Reader,
    StepInputs,
    StepLoss,
    flags_of,
    trainable_in,
)
from torchgpipe.distributed.failures import shared_failures
from torchgpipe.distributed.gradients import (
    Tied,
    average,
    equalise,
    reduce,
    sharded_in,
    total_norm,
    unsharded,
    verify_norm,
    verify_not_parallel,
    verify_same,
)
from torchgpipe.distributed.mail import Mail
from torchgpipe.distributed.messages import Forms
from torchgpipe.distributed.peers import Peers, Routes
from torchgpipe.distributed.runtime import Actions, fitting
from torchgpipe.engine.computation import Crew, ScheduledStep
from torchgpipe.engine.criterion import Criterion, explaining
from torchgpipe.engine.loop import Executor
from torchgpipe.engine.stages import Stages
from torchgpipe.engine.step_plan import Choice, text_of, title_of
from torchgpipe.engine.wrapper import Wrapper, begin_mini_batch, compute
from torchgpipe.partition.arguments import checked_balance, checked_device, verify_loss
from torchgpipe.partition.keeping import Keeping, words_of
from torchgpipe.partition.placement import place, verify_placement
from torchgpipe.partition.split import Partition, rename, split_module, verify_module
from torchgpipe.show.describe import Description
from torchgpipe.skip.skippable import verify_skippables
from torchgpipe.skip.tracker import inspect_skip_layout
from torchgpipe.values.structure import arguments

__all__ = ["Pipe"]


class Pipe(Wrapper):
    """Train an :class:`nn.Sequential` by pipeline parallelism over several processes.

    ::

        model = Pipe(nn.Sequential(a, b, c, d), [1, 1, 1, 1], chunks=8, loss=F.cross_entropy)
        loss = model.step(input, target)
        optimizer.step()

    Each process of the group makes the same call with the same layers, and keeps the layers of its
    own stages. Their names are those of the plain module, so ``state_dict()`` has the plain
    module's keys, those of this process. Layers may be on the meta device: this process's then get
    memory, filled with NaN, until a state dict is loaded.

    Args:
        module: the layers, of which this process keeps some: they are moved to its device, not
            copied.
        balance: how many layers each stage takes, in order. Most schedules have one stage in each
            process; V shapes have two, and interleaved schedules several.

    Keyword Args:
        loss: called as ``loss(output, *targets, **more)`` for each micro-batch, in the process of
            the last stage, which moves it to its device and keeps it if it is a module: see
            :class:`~torchgpipe.ScheduledLoss`. Without it, only forward runs.
        schedule: the name of a built-in schedule, such as ``'1f1b'``; a function of the numbers of
            workers and micro-batches; or a :class:`~torchgpipe.schedule.Schedule`, whose workers
            are the ranks in the group. Wherever it has an R, recomputation runs right before the
            backward.
        chunks: how many micro-batches to make of a mini-batch; a mini-batch with fewer rows is
            split into its rows. The number may be changed between steps, in all processes.
        checkpoint: which micro-batches are checkpointed, and what else is kept, as for
            :class:`~torchgpipe.GPipe`; a list has a mode for each stage, in whatever process.
        deferred_batch_norm: whether batch normalisations update their running statistics once per
            mini-batch: see :mod:`torchgpipe.batchnorm`.
        group: the processes of the pipeline; by default all.
        replicas: the processes with the same stages in other pipelines, over which the gradients
            of each step are averaged. Layers that :func:`torch.distributed.fsdp.fully_shard` has
            sharded need none.
        device: the device of this process; by default the current accelerator, or the CPU if there
            is none.
        outputs: whether :meth:`step` returns ``(loss, output)``, where the output is that of the
            last layer, without a gradient, in the process of the last stage, and None elsewhere.
        weight_of: the weight of a sum that the loss returns, as for ScheduledLoss.

    Raises:
        TypeError: the module is not an :class:`nn.Sequential`, or has more than its layers; skips
            are not stashed and popped in pairs; or the loss cannot be called.
        ValueError: balance, chunks or checkpoint are out of range, the schedule does not fit, or
            the processes differ in layers, balance or schedule.
        RuntimeError: there is no process group.
        ImportError: PyTorch is older than 2.13.

    Source: :mod:`torchgpipe.schedule` names the source of each schedule.
    """

    _own = (*Wrapper._own, "_crew", "_forms", "_actions", "_reader")

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        schedule: Choice = "1f1b",
        chunks: int = 1,
        checkpoint: Keeping | Sequence[Keeping] = "except_last",
        deferred_batch_norm: bool = False,
        group: Any = None,
        replicas: Any = None,
        device: Device | None = None,
        outputs: bool = False,
        weight_of: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        pipelining.verify_version()
        self._schedule, self._outputs, self._weight_of = schedule, outputs, weight_of
        self._device = current_device() if device is None else checked_device(device)
        self._peers = Peers(group, self._device)
        self._agreement = Agreement(self._peers)
        with self._agreement.on_errors():
            verify_module(module)
            verify_skippables(module)
            verify_not_parallel(module)
            if "loss" in module._modules:
                raise ValueError(
                    "a layer must not have the name that the loss has in the pipeline (layers: "
                    f"{[*module._modules]}); give it another one"
                )
            if loss is not None:
                verify_loss(loss, weight_of)
            checked_flag(deferred_batch_norm, "deferred_batch_norm")
            checked_flag(outputs, "outputs")
            others = None if replicas is None else Peers(replicas, self._device, "replicas")
            self._replicas = others
            self.balance = checked_balance(balance, module)
            self._set(module, chunks, checkpoint)
            fits = fitting(schedule, len(self.balance), self._peers.size, self._chunks)
            partitions = split_module(module, self.balance)
            layout = inspect_skip_layout(partitions)
        self._agreement.same_pipeline(module, loss, self.balance, fits)
        self._routes = Routes(fits.placement, self._peers.rank, layout)
        self._tied = Tied(partitions, loss, self._routes, self._peers)
        is_here = [j in self._routes.stages for j in range(len(partitions))]
        place([x for x, here in zip(partitions, is_here) if here], [self._device] * sum(is_here))
        partitions = [x if here else Partition() for x, here in zip(partitions, is_here)]
        self._tied.equalise()
        if isinstance(loss, nn.Module) and self.is_last:
            place([loss], [self._device])
        #: The layers (and the loss) of other processes, by name. Their state is not loaded here.
        self._others = {*module._modules} - {name for x in partitions for name in x._modules}
        for partition in partitions:
            # add_module() refuses the name of an attribute, and a layer may be called "balance".
            self._modules.update(partition._modules)
        self.loss = loss if self.is_last else None
        if not self.is_last:
            self._others.add("loss")
        # ``self._layers = ...`` would register the layers a second time.
        self.__dict__["_layers"] = partitions
        if deferred_batch_norm:
            for partition in partitions:
                defer(partition)
        self._layout = layout
        if self._replicas is not None:
            equalise(self, self._replicas)
        self._wrapped("Pipe")

    def _prepare(self) -> None:
        super()._prepare()
        layers = self._layers
        stages = Stages(layers, [self._device] * len(layers), self._layout)
        self._crew = Crew(stages, verify=self._tied.verify_here)
        self._forms = Forms(self._routes)
        #: A cached function: makes Actions for a number of micro-batches, grad and checkpoint mode.
        self._actions = cache(
            partial(Actions, self._schedule, self._layout, self._routes, self._peers)
        )
        self._reader = Reader(self._routes, self._device, stages.pool)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipe:
        for shared in (self._peers, self._replicas):
            memo[id(shared)] = shared
        pipe = memo[id(self)] = type(self).__new__(type(self))
        pipe.__dict__.update(copy.deepcopy(super().__getstate__(), memo))
        pipe._prepare()
        return pipe

    def __getstate__(self) -> Any:
        raise TypeError(
            "a pipeline over several processes cannot be pickled, since its processes and their "
            f"connections would not be there when it is loaded (rank: {self._peers.rank}); save "
            "its state_dict(), or torch.distributed.checkpoint's of all processes"
        )

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._device

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage in the group."""
        return tuple(self._routes.placement)

    @property
    def stages(self) -> list[int]:
        """The stages of this process."""
        return [*self._routes.stages]

    @property
    def is_first(self) -> bool:
        """Whether this process has the first stage, which reads the input."""
        return self._routes.is_first

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage, which reads the targets."""
        return self._routes.is_last

    @property
    def _partition_count(self) -> int:
        return len(self.balance)

    @property
    def _layers(self) -> list[Partition]:
        layers: list[Partition] = self.__dict__["_layers"]
        return layers

    @property
    def _width(self) -> int:
        return self._peers.size

    @property
    def _entrance(self) -> tuple[torch.device, str, str]:
        return self._device, "stage", "model.device"

    @property
    def schedule(self) -> Choice:
        """The schedule, as it was given."""
        return self._schedule

    def describe(self) -> Description:
        """Describe the stages of this process: their layers, sizes and checkpoint modes.

        Returns:
            A table, to be printed, whose rows have the figures. The last stage includes the loss,
            if that is a module.
        """
        text, rank = text_of(self._schedule), self._peers.rank
        return self._crew.stages.describe(self, self.loss, text, rank)

    def extra_repr(self) -> str:
        schedule = title_of(self._schedule)
        return f"rank={self._peers.rank}, schedule={schedule!r}, {super().extra_repr()}"

    @uncompiled
    def step(self, input: Any = None, *targets: Any, **more: Any) -> Any:
        """Compute the loss of a mini-batch, and add its gradients to those of the parameters.

        All processes of the group call it at the same time. In eval mode, and without grad, it
        computes the loss alone: nothing but the mode tells an evaluation from a step.

        Args:
            input: the input of the model: what its first layer takes, any nested structure of
                tensors. It is read in the process of the first stage, on its device; the others may
                pass the same, or None.
            *targets: further arguments of the loss, read in the process of the last stage. Tensors
                are split along dimension 0, as those of the input are, and moved to its device.
            **more: the same, by name.

        Returns:
            The loss, of shape ``()``, without a graph, in all processes; with ``outputs``, also the
            output.

        Raises:
            ValueError: the processes differ in what they call the step with, or there is no loss.
            RuntimeError: another process has failed; the message names it.
        """
        with torch.set_grad_enabled(self.training and torch.is_grad_enabled()):
            return self._run(input, (targets, more))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm together is at most a number.

        All processes of the group call it at the same time, between a step and the optimizer's.

        Args:
            max_norm: the largest norm.
            norm_type: the type of the norm: a positive number, or infinity.

        Returns:
            The norm before, of shape ``()``, in all processes. It is not finite if a gradient is
            not, and then gradients are not numbers any more, as after
            :func:`torch.nn.utils.clip_grad_norm_`.

        Raises:
            ValueError: another process calls something else, as a step, or with other numbers; or
                the type is not positive.
        """
        verify_norm(max_norm, norm_type)
        self._agreement.same_call(f"clip_grad_norm_({float(max_norm)}, {float(norm_type)})")
        with shared_failures(self._peers):
            parameters = self._tied.counted_here(self.parameters())
            norm = total_norm(parameters, norm_type, self._peers)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of a mini-batch, forward only; it has no graph.

        Args:
            *args: the arguments of the first layer, as for :class:`~torchgpipe.GPipe`, read in the
                process of the first stage.
            **kwargs: the same.

        Returns:
            The output in the process of the last stage, None in the others.
        """
        with torch.no_grad():
            return self._run(arguments(args, kwargs) if args or kwargs else None, None)

    def _run(self, input: Any, terms: Any) -> Any:
        recorded = torch.is_grad_enabled()
        # Within a torch.func transform no message arrives, so each process checks by itself.
        verify_no_transform()
        targets, first = terms[0] if terms else (), next(self._layers[0].children(), None)
        with shared_failures(self._peers), explaining(targets, first if self.is_first else None):
            inputs, shapes, flags, trainable, error = StepInputs(), "", [], 0, None
            modules = modules_of(self)
            try:
                if recorded and is_within_float16():
                    warn(
                        "under autocast to float16 small gradients become zero, and a pipeline "
                        "over several processes takes no gradient scaler (autocast: float16); use "
                        "bfloat16"
                    )
                inputs = self._reader.read(self, input, terms)
                shapes = inputs.shapes
                flags, trainable = flags_of(modules), trainable_in(modules)
            except Exception as raised:
                error = raised
            # Checkpoint modes are compared as words: a policy is another object in each process.
            modes = words_of(self.checkpoint, len(self.balance))
            settings = ("forward" if terms is None else "step", self.chunks, modes, recorded)
            agree = self._agreement.begin(inputs, shapes, settings, flags, trainable, error)
            if self.training and (self._updated or any(x._buffers for x in modules)):
                # The first cell must not change statistics before all processes accept the step.
                # guard: buffers of a step that is refused
                agree()
            if self._replicas is not None and torch.is_grad_enabled():
                # agree() makes sure that all processes of this pipeline raise if replicas differ.
                agree()
                verify_same(trainable, self._replicas)
            return self._compute(agree, inputs, terms)

    def _traced(self) -> tuple[Stages, list[torch.device]]:
        return self._crew.stages, [self._device]

    def _compute(self, agree: Callable[[], Agreed], inputs: StepInputs, terms: Any) -> Any:
        """Compute a step, whose first cell may run before all processes have agreed on it."""
        with_loss, arguments, arriving = terms is not None, inputs.arguments, inputs.arriving
        batches, mini_batch = inputs.batches, inputs.mini_batch
        # The first stage does not wait for the others: it computes while their answers arrive.
        division = agree().division if mini_batch is None or self.is_last else mini_batch.division
        m, rows = division.m, division.rows
        if with_loss and self.is_last and (arguments is None or len(arguments) != m):
            # Only the agreed division tells how many rows and micro-batches the arguments have.
            arguments, arriving = self._reader.arguments(terms, division)
        actions = self._actions(m, torch.is_grad_enabled(), self._checkpoint)
        criterion = Criterion(
            self.loss if with_loss else None,
            arguments or [((), {})] * m,
            *(division, None, self._outputs or not with_loss, self._weight_of),
        )
        sharded, output = sharded_in(self._layers), None
        with unsharded(sharded):
            verify_placement(self._layers, [self._device] * len(self._layers))
            new_mail = partial(Mail, self._forms, self._routes, self._peers)
            begin_mini_batch(self)
            step = ScheduledStep(self._crew, actions.plan, batches, criterion, arriving, new_mail)
            executor, mail = Executor(step), step.post
            assert isinstance(mail, Mail)
            try:
                run = partial(executor.run, partial(actions.run, executor, mail, agree))
                compute(run, self, mini_batch.whole if mini_batch else (), step.context.modes, m)
                # Joining outputs may fail, so other processes are told later that the step is done.
                if criterion.outputs is not None and self.is_last:
                    output = criterion.joined(step.blocks)
                ends = criterion.total() if with_loss and self.is_last else (None, None)
                step_loss = self._agreement.end(mail, *ends)
                # The last stage has time for this check, while others compute their last backwards.
                self._traps.coupled([criterion.shapes], rows, (), self.parameters())
                if step_loss is not None and torch.is_grad_enabled():
                    self._hand_over(step, step_loss)
                    reduce(sharded)
                self._agreement.wait_for_all(mail)
            finally:
                mail.end()
        loss = step_loss and step_loss.value
        return output if not with_loss else (loss, output) if self._outputs else loss

    def _hand_over(self, step: ScheduledStep, loss: StepLoss) -> None:
        """Add the gradients of a step to those of the weights and of the input."""
        (sums,) = step.sums.by_worker
        # guard: gradients of tied weights
        self._tied.add_up(sums)
        if self._replicas is not None:
            average(chain(*step.sums.weights), sums, self._replicas)
        # Empty if no tensor here got a gradient; the backward of the zeros hands gradients over.
        if zeros := step.sums.zeros(step.links, step.post, loss.value.dtype):
            factor = torch.ones_like(loss.value) if loss.divisor is None else 1 / loss.divisor
            grads = tuple([factor.to(x.device) for x in zeros])
            # Not by torch.autograd.backward(), whose checks would only take time here.
            _torch.run_backward(tuple(zeros), grads, False, False, (), True, True)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A parent module calls this method, not load_state_dict(), so keys are renamed here.
        names = [name for layers in self._layers for name in layers._modules]
        prefixes = dict.fromkeys(names, "") | dict.fromkeys(self._others)
        rename(state_dict, prefix, prefixes)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
