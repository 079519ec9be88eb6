"""Trainers for wrapped models: they see the model itself, and call the wrapper, for one loss."""

from __future__ import annotations

import copyreg
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.partition.arguments import checked_count
from torchgpipe.recompute.once import OncePerMiniBatch
from torchgpipe.transformers.collating import KEY, Collated, Collator, Loader, Prepared
from torchgpipe.transformers.idleness import Idleness, PipelineCallback
from torchgpipe.transformers.joined_step import JoinedStep, one_backward
from torchgpipe.transformers.model_call import ModelCall, compute, loss_only
from torchgpipe.transformers.spread import Spread
from torchgpipe.transformers.spread_trainer import SpreadTrainer
from torchgpipe.values.division import row_count

__all__: list[str] = []


logger = logging.getLogger("torchgpipe")

#: The most mini-batches in one call of the model: their training steps run one within another, on
#: one stack.
DEEPEST = 32


@cache
def pipelined(trainer: type) -> Any:
    """Make a Trainer's class train a model over several devices.

    ::

        trainer = pipelined(Trainer)(model=model, args=args, devices=4, chunks=8, ...)

    All arguments are the Trainer's own, but for these:

    - ``devices``: how many accelerators, or which ones; by default all. Without any the model
      trains on the CPU, with a warning.
    - ``chunks``: how many micro-batches to make of an optimizer step, by default two for each
      device.
    - ``checkpoint`` and ``slices``: as in :class:`~torchgpipe.MappedGPipe`.
    - ``joined``: the most mini-batches of an optimizer step that go through the devices in one
      call; by default as few as it takes for ``chunks`` micro-batches.
    - ``accept_loss``: whether to train a loss that the micro-batches do not make. Two rows show it
      before the first step, and it is an error by default.

    The model is spread when it is called first, by the times that its blocks take for a micro-batch
    of that call. A model that Accelerate has spread keeps its map. A
    :class:`~torchgpipe.MappedGPipe` is taken as it is. A reference model or a teacher is spread,
    too, in the way of the model if it is of its class.

    The Trainer sees the model itself, and its files are the plain model's. Within a step
    ``trainer.model`` is a stand-in, whose calls go through the devices. The loss is that of the
    whole mini-batch, on the device of the inputs.

    Args:
        trainer: :class:`transformers.Trainer`, or a class that inherits from it.

    Returns:
        A subclass of it.

    Raises:
        TypeError: the class is no Trainer.
    """
    if not (isinstance(trainer, type) and issubclass(trainer, transformers.Trainer)):
        raise TypeError(
            "pipelined() takes a class of Trainers (trainer: "
            f"{getattr(trainer, '__name__', type(trainer).__name__)}); pass transformers.Trainer, "
            "or a class that inherits from it"
        )
    if issubclass(trainer, Pipelined):
        return trainer
    kinds = (Made,) if issubclass(Made, type(trainer)) else (Made, type(trainer))
    kind: Any = Made if len(kinds) == 1 else type(Made.__name__, kinds, {})
    copyreg.pickle(kind, reduced)
    return kind(f"Pipelined{trainer.__name__}", (Pipelined, trainer), {})


@contextmanager
def calling(model: nn.Module, part: nn.Module) -> Iterator[None]:
    """Have a part of a model called in its place within a ``with`` block."""
    before = vars(model).get("forward")
    vars(model)["forward"] = lambda *args, **kwargs: part(*args, **kwargs)
    try:
        yield
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before


class Made(type):
    """The class of pipelined classes: pickle makes them again, since it finds none by its name."""


def reduced(made: type) -> Any:
    """The pickle of a pipelined class, or of one that inherits from it."""
    if made.__bases__[0] is not Pipelined:
        return made.__qualname__
    return pipelined, made.__bases__[1:]


class Pipelined(SpreadTrainer):
    """A mixin for Trainers whose steps go through the devices, micro-batch by micro-batch."""

    label_names: list[str]
    data_collator: Any
    callback_handler: Any
    state: Any

    def __init__(
        self, *args: Any, joined: int | None = None, accept_loss: bool = False, **kwargs: Any
    ) -> None:
        if joined is not None:
            remedy = "joined=1 computes each mini-batch alone"
            joined = checked_count(joined, "joined", "mini-batches in one call", remedy)
        self._most = joined
        #: Whether the micro-batches' loss may differ from the mini-batch's. Else that is an error.
        self._accepts = accept_loss
        #: The mini-batches of the optimizer step for which ``training_step`` is still to be called.
        self._batches: list[Any] = []
        #: Losses that were computed ahead: those of the first mini-batches in ``_batches``.
        self._losses: list[Tensor] = []
        #: For the id() of each mini-batch that cannot be cut by rows: the mini-batch, with its
        #: micro-batches.
        self._collated: dict[int, Collated] = {}
        #: The mini-batches of ``_collated`` on the inputs' device, each with its micro-batches.
        self._prepared: list[Prepared] = []
        self._joined_step: JoinedStep | None = None
        self._figures: Idleness | None = None
        #: Whether the idleness of the first step was logged, which happens once.
        self._is_said = False
        super().__init__(*args, **kwargs)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        above: Any = super()
        # By default Accelerate slices the mini-batches of an IterableDataset by rows.
        is_sliced = isinstance(dataset, IterableDataset) and (
            self.accelerator.dispatch_batches is not False
        )
        collator = self.data_collator
        self.data_collator = Collator(collator, self._spread.chunks, is_sliced)
        try:
            return above._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = collator

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect the mini-batches of an optimizer step, as the Trainer's class does."""
        above: Any = super()
        self._say()
        self._collated, self._prepared, self._losses, self._figures = {}, [], [], None
        batches = map(self._without_parts, epoch_iterator)
        samples = above.get_batch_samples(batches, *args, **kwargs)
        self._batches = [*samples[0]]
        for callback in self._callbacks():
            callback.begin(self.state.global_step + 1, self.pipe)
        return samples

    def _callbacks(self) -> list[PipelineCallback]:
        return [x for x in self.callback_handler.callbacks if isinstance(x, PipelineCallback)]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer's class does, with what a :class:`PipelineCallback` asks for."""
        above: Any = super()
        self._say()
        if self._callbacks() and self._figures:
            logs.update(self._figures.logs())
        above.log(logs, *args, **kwargs)

    def _say(self) -> None:
        """Say once how the first step went, after it."""
        if self._figures and not self._is_said:
            self._is_said = True
            logger.warning(self._figures.line())

    def _without_parts(self, batch: Any) -> Any:
        """Take the micro-batches out of a mini-batch that cannot be cut."""
        if isinstance(batch, Mapping) and KEY in batch:
            self._collated[id(batch)] = Collated(batch)
        return batch

    def _prepare_inputs(self, inputs: Any) -> Any:
        above: Any = super()
        whole = above._prepare_inputs(inputs)
        if (collated := self._collated.get(id(inputs))) is not None:
            # If a mini-batch was changed, its micro-batches are out of date, and it is not divided.
            parts = collated.parts if collated.is_unchanged() else []
            cut = [above._prepare_inputs(part) for part in parts] if len(parts) > 1 else [{**whole}]
            self._prepared.append(Prepared({**whole}, cut))
        return whole

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of a mini-batch, and the gradients, as the Trainer's class does.

        The first one of a step computes those of the mini-batches after it, too: as many as it
        takes for ``chunks`` micro-batches. These find their losses then.
        """
        above: Any = super()

        def one_step(inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            loss: Tensor = above.training_step(model, inputs, *args, **kwargs)
            # A loss of the user's code may be on the head's device, where Trainer would raise.
            return loss.to(self.args.device)

        if not (self._batches and self._batches[0] is inputs):
            return one_step(inputs, *args, **kwargs)
        batches = [] if self._losses else self._joined()
        del self._batches[0]
        if len(batches) == 1:
            return one_step(inputs, *args, **kwargs)
        if batches:
            self._joined_step = JoinedStep(
                lambda k: one_step(batches[k], *args, **kwargs),
                len(batches),
                self._computed,
                self._state,
            )
            try:
                with one_backward(self.accelerator):
                    self._losses = self._joined_step.losses()
            finally:
                self._joined_step = None
            # The mini-batches of this call are not read again: an empty list frees their memory.
            self._prepared = []
        return self._losses.pop(0)

    def _joined(self) -> list[Any]:
        """The mini-batches, from the next one on, that go through the pipeline in one call."""
        rows, most = 0, self._most if self._can_join else 1
        for count, batch in enumerate(self._batches, 1):
            collated = self._collated.get(id(batch))
            rows += len(collated.parts) if collated else rows_of(batch)
            if count in (most, DEEPEST) or (most is None and rows >= self._spread.chunks):
                return self._batches[:count]
        return [*self._batches]

    def _state(self) -> list[Any]:
        """The objects in the Trainer's attributes, and in lists and dicts there."""
        ours = ("_collated", "_prepared", "_batches", "_losses", "_joined_step", "_figures")
        attributes = [(key, x) for key, x in vars(self).items() if key not in ours]
        within = [[*x.values()] if isinstance(x, dict) else x for _, x in attributes]
        lists = [x for x in within if isinstance(x, list | tuple | set | deque)]
        return [*chain(*attributes), *chain(*lists)]

    @property
    def _can_join(self) -> bool:
        """Whether mini-batches may be computed together: code of their own may forbid it."""
        above: Any = super()
        return (
            is_of_library(above.training_step)
            and above._prepare_inputs.__func__ is transformers.Trainer._prepare_inputs
            # In a joined call these layers would update statistics once, and not per mini-batch.
            and not any(
                isinstance(x, DeferredBatchNorm | OncePerMiniBatch)
                for x in self._spread.model.modules()
            )
        )

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss of a mini-batch, as the Trainer's class does, by the wrapper."""
        above: Any = super()
        needed = (
            return_outputs
            or getattr(self, "label_smoother", None) is not None
            or getattr(self, "compute_loss_func", None) is not None
            or above.compute_loss.__func__ is not transformers.Trainer.compute_loss
        )
        with nullcontext() if needed else loss_only(self._spread.model):
            return above.compute_loss(model, inputs, return_outputs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer's class does, also what cannot be cut by rows."""
        before = self._collated, self._prepared

        def take(batch: Any) -> Any:
            self._collated, self._prepared = {}, []
            return self._without_parts(batch)

        try:
            return super().evaluation_loop(Loader(dataloader, take), *args, **kwargs)
        finally:
            self._collated, self._prepared = before

    def _called(
        self, spread: Spread, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a model, or a part of it, through the pipeline."""
        # The call is for the prepared mini-batch that has most of the call's tensors in it.
        counts = [x.count_in(kwargs) for x in self._prepared]
        most = max(counts, default=0)
        parts = self._prepared[counts.index(most)].divided(args, kwargs) if most else []
        # ``strict`` is None, without a proof of the loss, where the model's own loss is not used.
        unused = spread is not self._spread or getattr(self, "compute_loss_func", None) is not None
        strict = None if unused else not self._accepts
        call = ModelCall(args, kwargs, parts, self.label_names, self.args.device, strict)
        pipe = spread.pipe or spread.made(call.sample(spread.model, spread.chunks))
        if module is not spread.model:
            with calling(pipe.module, module):
                return compute(pipe, [call])[0]
        if spread is not self._spread:
            return compute(pipe, [call])[0]
        if self._joined_step is not None:
            return self._joined_step.call(call)
        return self._computed([call])[0]

    def _computed(self, calls: Sequence[ModelCall]) -> list[Any]:
        """Compute calls of the Trainer's model in one call of its wrapper."""
        pipe = self._spread.made()
        outputs = compute(pipe, calls)
        if torch.is_grad_enabled():
            groups = [] if self._figures is None else self._figures.groups
            sizes = [size for call in calls for size in call.division.sizes]
            devices = [*dict.fromkeys(pipe.device_map.values())]
            self._figures = Idleness(devices, [*groups, sizes], pipe._slicing.count)
        return outputs


def rows_of(batch: Any) -> int:
    """The number of rows of a mini-batch; 1 if nothing tells."""
    return row_count({**batch} if isinstance(batch, Mapping) else batch) or 1


def is_of_library(method: Any) -> bool:
    """Whether a method is that of Transformers or TRL, and not of a user's class."""
    return method.__func__.__module__.partition(".")[0] in ("transformers", "trl")
