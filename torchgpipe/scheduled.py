"""The loss of a wrapped model under any schedule, whose backward runs within the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from torchgpipe._torch.dynamo import uncompiled
from torchgpipe.ambient.modes import is_within_float16
from torchgpipe.ambient.notes import warn
from torchgpipe.checks import checked_flag, verify, verify_kind
from torchgpipe.engine.computation import Cells, Crew, ScheduledStep
from torchgpipe.engine.criterion import Criterion, arguments_of, explaining
from torchgpipe.engine.loop import Executor
from torchgpipe.engine.stages import Stages, stages_of
from torchgpipe.engine.step_plan import Choice, StepPlan, plan, text_of, title_of, verify_choice
from torchgpipe.engine.wrapper import MadeAnew, MiniBatch, begin_mini_batch
from torchgpipe.gpipe import GPipe
from torchgpipe.graphs.cell import GraphCells
from torchgpipe.graphs.parts import slice_compiler
from torchgpipe.graphs.slices import CHOICES, function_of
from torchgpipe.graphs.stage import StageGraphs, costs_of, traced_all
from torchgpipe.partition.arguments import verify_loss
from torchgpipe.partition.keeping import keepings_of, verify_words
from torchgpipe.partition.placement import is_shard
from torchgpipe.schedule.costs import Costs
from torchgpipe.show.describe import Description
from torchgpipe.values.structure import arguments as packed

__all__ = ["ScheduledLoss", "arguments"]


def arguments(*args: Any, **kwargs: Any) -> Any:
    """The input of a model whose first layer takes several arguments, as one value.

    ::

        loss = training(arguments(tokens, mask=NoChunk(mask)), target)
    """
    return packed(args, kwargs)


class ScheduledLoss(MadeAnew):
    """Train a wrapped model under any schedule, by an ordinary ``loss.backward()``.

    ::

        model = GPipe(layers, balance, devices=[0, 1, 2, 3, 3, 2, 1, 0], chunks=8)
        training = ScheduledLoss(model, F.cross_entropy, schedule="zero_bubble_v")
        loss = training(input, target)
        loss.backward()

    The loss is inside, since schedules need that of each micro-batch. The call computes the
    gradients, too, and ``loss.backward()`` hands them over, multiplied by whatever was done to the
    loss (:doc:`schedule`). Without grad the call computes the loss alone.

    Args:
        model: the wrapped model, whose ``chunks`` and ``checkpoint`` hold here, too.
        loss: called as ``loss(output, *targets, **more)`` for each micro-batch, on the last device.
            It returns the mean over rows, or ``(sum, weight)`` for a mean of another kind, such as
            over tokens (:doc:`losses`).
        schedule: a name, such as ``'1f1b'``; a function of the numbers of workers (devices) and
            micro-batches; or a :class:`~torchgpipe.schedule.Schedule`.
        outputs: whether the call returns ``(loss, output)``, where the output has no gradient.
        weight_of: for a loss that returns a sum: ``weight_of(*targets, **more)`` returns the
            weight of a micro-batch, so that weights are known before the first backward.
        stages: ``'eager'``, or ``'graph'``, by FX graphs (:doc:`graphs`).
        compile: for graphs: the backend of :func:`torch.compile` for each part.
        recompute: for graphs: what checkpointed cells compute again, ``'everything'`` or by a
            ``'min-cut'``, cheap operators only.
        scaler: a gradient scaler, which scales the losses before backward, for float16. The caller
            scales the loss with the same one.

    ``schedule`` may be changed between steps. Errors say what to pass instead.
    """

    _own = ("_crew", "_plans")
    weight_of: Callable[..., Any] | None

    def __init__(
        self,
        model: GPipe,
        loss: Callable[..., Any],
        schedule: Choice = "1f1b",
        *,
        outputs: bool = False,
        weight_of: Callable[..., Any] | None = None,
        scaler: Any = None,
        stages: str = "eager",
        compile: str | Callable[..., Any] | None = None,
        recompute: str = "everything",
    ) -> None:
        super().__init__()
        self.model = model
        # Set before the loss: ``self.loss = ...`` checks the loss together with weight_of.
        self.__dict__["weight_of"] = weight_of
        self.loss = loss
        self.outputs = outputs
        self.scaler = scaler
        self.stages, self.backend, self.recompute = stages, compile, recompute
        _verify_stages(stages, compile, recompute)
        self.training = model.training
        self._prepare()
        self.schedule = schedule

    def __setattr__(self, name: str, value: Any) -> None:
        verify = _CHECKS.get(name)
        if verify is not None:
            verify(value)
        elif name == "loss":
            verify_loss(value, self.weight_of)
        elif name == "weight_of":
            verify_loss(self.loss, value)
        super().__setattr__(name, value)

    def _prepare(self) -> None:
        self.__dict__["_crew"] = None
        self.__dict__["_plans"] = {}

    @uncompiled
    def forward(self, input: Any, *targets: Any, **more: Any) -> Any:
        """Compute the loss of a mini-batch, and the gradients of all that it depends on.

        Tensors in the input, which is on the first device, and in the targets are split along
        dimension 0. Targets come to the last device. The loss has the shape ``()``, and is on the
        last device, as outputs are.
        """
        mini_batch = MiniBatch(self.model, input, self.loss)
        begin_mini_batch(self.model, self.loss)
        step = self._step(mini_batch, (targets, more))
        with explaining(targets, self.model[0]):
            mini_batch.compute(Executor(step).run)
        criterion = step.criterion
        mini_batch.warn_of_coupled(criterion.shapes)
        value, divisor = criterion.total()
        if torch.is_grad_enabled() and criterion.depends:
            value = step.outcome(value, divisor)
        if criterion.outputs is None:
            return value
        return value, criterion.joined(step.blocks)

    def costs(self, input: Any, *targets: Any, **more: Any) -> Costs:
        """Count operations and bytes of each stage's graph, without a step (:doc:`graphs`)."""
        if self.stages != "graph":
            raise ValueError(
                "costs are counted from graphs (stages: 'eager'); pass "
                "ScheduledLoss(..., stages='graph')"
            )
        mini_batch = MiniBatch(self.model, input)
        with torch.enable_grad():
            step = self._step(mini_batch, (targets, more))
            return costs_of(traced_all(step, self.graphs))

    def retrace(self) -> None:
        """Trace the stages anew, from the next step on: what was traced is what runs."""
        self.__dict__["_crew"] = None

    def _step(self, mini_batch: MiniBatch, terms: Any) -> ScheduledStep:
        """Make what the computations of a step have in common."""
        model, m, batches = self.model, mini_batch.m, mini_batch.batches
        recorded = torch.is_grad_enabled()
        crew = self._crew_of(model)
        arguments, arriving = arguments_of(
            terms, mini_batch.division, crew.stages.pool, model.devices[-1]
        )
        criterion = Criterion(
            self.loss,
            arguments,
            mini_batch.division,
            self._scale() if recorded else None,
            self.outputs,
            self.weight_of,
        )
        chosen = self._plan(m, forward=not recorded)
        step = ScheduledStep(crew, chosen, batches, criterion, arriving)
        if any(map(is_shard, chain(*step.sums.weights))):
            raise ValueError(
                "a scheduled loss must not have layers that are sharded by FSDP2, which gathers "
                "and frees weights around a backward of its own (schedule: "
                f"{self.schedule!r}); use the GPipe itself, with the loss after it"
            )
        return step

    @property
    def schedule(self) -> Choice:
        """The schedule, as it was given."""
        choice: Choice = self.__dict__["_schedule"]
        return choice

    @schedule.setter
    def schedule(self, choice: Choice) -> None:
        before = self.__dict__.get("_schedule")
        self.__dict__["_schedule"] = choice
        self.__dict__["_plans"].clear()
        try:
            # A schedule that does not fit the model raises now, and not in the first step.
            self._plan(self.model.chunks, forward=False)
        except BaseException:
            self.__dict__["_schedule"] = before
            raise

    def describe(self) -> Description:
        """Describe the partitions, as :meth:`GPipe.describe` does, and the schedule."""
        return stages_of(self.model).describe(self.model, self.loss, text_of(self.schedule))

    def extra_repr(self) -> str:
        """The settings, for the first line of ``repr()``."""
        return f"schedule={title_of(self.schedule)!r}, stages={self.stages!r}"

    @property
    def graphs(self) -> Sequence[StageGraphs]:
        """The graphs of each stage, from the first step on; none for eager stages."""
        crew: Crew | None = self.__dict__["_crew"]
        return crew.cells.graphs if crew and isinstance(crew.cells, GraphCells) else []

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """The device of each layer, by name, as :attr:`GPipe.hf_device_map` has it."""
        return {f"model.{name}": x for name, x in self.model.hf_device_map.items()}

    def _traced(self) -> tuple[Stages, list[torch.device]]:
        """The object that holds the spans of a trace, and the devices."""
        return stages_of(self.model), self.model.devices

    def _plan(self, m: int, *, forward: bool) -> StepPlan:
        plans = self.__dict__["_plans"]
        model, stages = self.model, stages_of(self.model)
        modes = keepings_of(model.checkpoint, len(model.devices))
        if self.stages == "graph":
            verify_words(
                modes,
                "a stage that is a graph",
                "use stages='eager', or checkpoint='always', which with recompute='min-cut' keeps "
                "what is dear to compute",
            )
        key = id(self.schedule), id(stages), m, modes, forward
        if key not in plans:
            skips = stages.skip_layout.pairs
            made = plan(self.schedule, model.devices, m, modes, skips, forward=forward)
            # Schedule and stages are held, so that no other objects get the ids in the key.
            plans[key] = made, self.schedule, stages
        step_plan: StepPlan = plans[key][0]
        return step_plan

    def _crew_of(self, model: GPipe) -> Crew:
        crew = self.__dict__["_crew"]
        # A crew serves as long as the stages, the loss and the settings are the same objects. The
        # stages are others in a forked process, which needs a crew of its own.
        stages = stages_of(model)
        basis = stages, self.loss, self.stages, self.backend, self.recompute
        if crew is None or not all(a is b for a, b in zip(crew.basis, basis)):
            _verify_stages(self.stages, self.backend, self.recompute)
            cells = Cells()
            if self.stages == "graph":
                make = function_of if self.backend is None else slice_compiler(self.backend)
                choice = CHOICES[self.recompute]
                after = [*[None] * (len(model.partitions) - 1), self.loss]
                pairs = enumerate(zip(model.partitions, after))
                cells = GraphCells([StageGraphs(j, *pair, make, choice) for j, pair in pairs])
            crew = self.__dict__["_crew"] = Crew(stages, cells, basis)
        current: Crew = crew
        return current

    def _scale(self) -> Callable[[Tensor], Tensor] | None:
        if self.scaler is not None:
            scale: Callable[[Tensor], Tensor] = self.scaler.scale
            return scale
        if is_within_float16():
            warn(
                "under autocast to float16, a scheduled loss needs the gradient scaler, since its "
                "backward runs within the call, before scaler.scale(loss) (scaler: None); pass "
                "ScheduledLoss(..., scaler=scaler), or use bfloat16"
            )
        return None


def _verify_model(model: Any) -> None:
    rule = "model must be a GPipe, which has the stages and their devices"
    verify_kind(model, GPipe, rule, "model", "wrap the layers first, as in GPipe(layers, balance)")
    rule = "model must have a partition, after which the loss is"
    verify(model.devices, rule, "partitions", len(model.devices), "wrap at least one layer")


def _verify_scaler(scaler: Any) -> None:
    valid = scaler is None or callable(getattr(scaler, "scale", None))
    rule = "scaler must have a scale(), as a gradient scaler has"
    verify(valid, rule, "scaler", scaler, "pass torch.amp.GradScaler(), or None", TypeError)


def _verify_way(stages: Any) -> None:
    valid = isinstance(stages, str) and stages in ("eager", "graph")
    rule, remedy = "stages must be 'eager' or 'graph'", "use 'graph' to trace each stage once"
    verify(valid, rule, "stages", stages, remedy)


def _verify_backend(compile: Any) -> None:
    valid = compile is None or isinstance(compile, str) or callable(compile)
    rule, remedy = "compile must be a backend of torch.compile", "pass such as 'inductor', or None"
    verify(valid, rule, "compile", compile, remedy, TypeError)
    if isinstance(compile, str):
        known = torch.compiler.list_backends(exclude_tags=())
        rule = "compile must be the name of a backend of torch.compile"
        verify(compile in known, rule, "compile", compile, f"use one of {known}")


def _verify_recompute(recompute: Any) -> None:
    rule = f"recompute must be one of {[*CHOICES]}"
    valid = isinstance(recompute, str) and recompute in CHOICES
    verify(valid, rule, "recompute", recompute, "use the first one for eager stages")


#: For each attribute of a ScheduledLoss, the function that raises an error if a value is wrong.
_CHECKS: dict[str, Callable[[Any], object]] = {
    "model": _verify_model,
    "schedule": verify_choice,
    "outputs": partial(checked_flag, name="outputs"),
    "scaler": _verify_scaler,
    "stages": _verify_way,
    "backend": _verify_backend,
    "recompute": _verify_recompute,
}


def _verify_stages(stages: str, compile: Any, recompute: str) -> None:
    """Check that ``stages``, ``compile`` and ``recompute`` go together.

    Raises:
        ValueError: they do not.
    """
    if compile is not None and stages != "graph":
        raise ValueError(
            "only graphs are compiled part by part (compile: "
            f"{compile!r}, stages: {stages!r}); pass stages='graph', or compile the layers"
        )
    if recompute != "everything" and stages != "graph":
        raise ValueError(
            "eager stages recompute everything (recompute: "
            f"{recompute!r}, stages: {stages!r}); pass stages='graph'"
        )
