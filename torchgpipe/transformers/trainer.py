"""Trainers for wrapped models: they see the model itself, and call the wrapper, for one loss."""

from __future__ import annotations

import copyreg
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "torchgpipe.transformers needs Transformers (not installed: transformers); run: "
        "pip install torchgpipe[transformers]"
    ) from error

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.partition.arguments import checked_count
from torchgpipe.recompute.once import OncePerMiniBatch
from torchgpipe.transformers.collating import KEY, Collated, Collator, Loader, Prepared
from torchgpipe.transformers.joined_step import JoinedStep, one_backward
from torchgpipe.transformers.model_call import ModelCall, compute
from torchgpipe.transformers.stand_in import PipelinedModel
from torchgpipe.values.division import row_count

__all__: list[str] = []


#: The most mini-batches in one call: each is within the call of the one in front.
DEEPEST = 32


@cache
def pipelined(trainer: type) -> Any:
    """Make a Trainer's class train a wrapped model.

    ::

        trainer = pipelined(Trainer)(model=MappedGPipe(model, device_map, chunks=8), args=args, ...)

    The Trainer sees the model itself: ``trainer.model`` is ``pipe.module``, and its class, its
    configuration, its labels and its files are the plain model's. Losses and predictions are
    computed by the wrapper. The loss is that of the whole mini-batch, on the device of the inputs.
    The mini-batches of an optimizer step go through the wrapper in one call, as few as it takes for
    ``chunks`` micro-batches; ``joined=2``, a further argument, is at most two of them, and 1 none.
    Two rows prove that loss before the first step, and ``accept_loss=True`` trains another one.

    Args:
        trainer: :class:`transformers.Trainer`, or a class that inherits from it.

    Returns:
        A subclass of it, whose ``model`` is a :class:`~torchgpipe.MappedGPipe`; or whose
        ``model_init`` returns one.

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


class Made(type):
    """The class of pipelined classes: pickle makes them again, since it finds none by its name."""


def reduced(made: type) -> Any:
    """The pickle of a pipelined class, or of one that inherits from it."""
    if made.__bases__[0] is not Pipelined:
        return made.__qualname__
    return pipelined, made.__bases__[1:]


class Pipelined:
    """A mixin for Trainers whose model is a wrapper."""

    model: nn.Module
    args: Any
    accelerator: Any
    label_names: list[str]
    data_collator: Any

    def __init__(
        self, *args: Any, joined: int | None = None, accept_loss: bool = False, **kwargs: Any
    ) -> None:
        #: The wrapper.
        self.pipe: MappedGPipe
        if joined is not None:
            remedy = "joined=1 computes each mini-batch alone"
            joined = checked_count(joined, "joined", "mini-batches in one call", remedy)
        self._most = joined
        #: Whether a loss that is not the mini-batch's is no error.
        self._accepts = accept_loss
        #: The mini-batches of the optimizer step that are to come, and losses of those in front.
        self._batches: list[Any] = []
        self._losses: list[Tensor] = []
        #: Mini-batches that cannot be cut, by identity, and those that are on their device.
        self._collated: dict[int, Collated] = {}
        self._prepared: list[Prepared] = []
        self._step: JoinedStep | None = None
        # These are the first two arguments of all Trainers.
        names = ("model", "args")[: len(args)]
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("model") is not None or given.get("model_init") is None:
            given["model"] = self._unwrapped(given.get("model"))
        arguments = given.get("args")
        if arguments is not None:
            verify(arguments)
        super().__init__(*map(given.pop, names), *args[2:], **given)
        if self.model is not self.pipe.module:
            raise ValueError(
                "a Trainer must train the model that was wrapped (wrapped: "
                f"{type(self.pipe.module).__name__}, trained: {type(self.model).__name__}); give "
                "it its adapters first, as MappedGPipe(get_peft_model(model, config), ...)"
            )
        places = {*self.pipe.hf_device_map.values()}
        if self.args.n_gpu > 1 and len(places) == 1:
            raise ValueError(
                "a Trainer copies a model that is on one device to all GPUs (device: "
                f"{places.pop()}, GPUs: {self.args.n_gpu}); map the model to several of them, or "
                "hide the others by CUDA_VISIBLE_DEVICES"
            )

    def _unwrapped(self, pipe: Any) -> nn.Module:
        if not isinstance(pipe, MappedGPipe):
            raise TypeError(
                "the model of a pipelined Trainer is a wrapped one (model: "
                f"{type(pipe).__name__}); pass MappedGPipe(model, device_map, chunks=8)"
            )
        self.pipe = pipe
        # Neither Trainer nor Accelerate moves a model with a map of several entries.
        names = [name for name, _ in pipe.module.named_children()]
        places = pipe.hf_device_map
        if len(places) == 1:
            places = {name: device for device in places.values() for name in names}
        model: Any = pipe.module
        model.hf_device_map = places
        return pipe.module

    def call_model_init(self, trial: Any = None) -> nn.Module:
        above: Any = super()
        return self._unwrapped(above.call_model_init(trial))

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        above: Any = super()
        # By default Accelerate slices the mini-batches of a dataset without a length.
        is_sliced = isinstance(dataset, IterableDataset) and (
            self.accelerator.dispatch_batches is not False
        )
        own = self.data_collator
        self.data_collator = Collator(own, self.pipe.chunks, is_sliced)
        try:
            return above._get_dataloader(dataset, *args, **kwargs)
        finally:
            self.data_collator = own

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Collect the mini-batches of an optimizer step, as the Trainer's class does."""
        above: Any = super()
        self._collated, self._prepared, self._losses = {}, [], []
        batches = map(self._without_parts, epoch_iterator)
        found = above.get_batch_samples(batches, *args, **kwargs)
        self._batches = [*found[0]]
        return found

    def _without_parts(self, batch: Any) -> Any:
        """Take the micro-batches out of a mini-batch that cannot be cut."""
        if isinstance(batch, Mapping) and KEY in batch:
            self._collated[id(batch)] = Collated(batch)
        return batch

    def _prepare_inputs(self, inputs: Any) -> Any:
        above: Any = super()
        found = above._prepare_inputs(inputs)
        if (collated := self._collated.get(id(inputs))) is not None:
            # What somebody has changed since is one micro-batch.
            parts = collated.parts if collated.is_unchanged() else []
            own = [above._prepare_inputs(part) for part in parts] if len(parts) > 1 else [{**found}]
            self._prepared.append(Prepared({**found}, own))
        return found

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss of a mini-batch, and the gradients, as the Trainer's class does.

        The first one of a step computes those of the mini-batches after it, too: as many as it
        takes for ``chunks`` micro-batches. These find their losses then.
        """
        above: Any = super()
        own: Callable[..., Tensor] = partial(above.training_step, model)
        if not (self._batches and self._batches[0] is inputs):
            return own(inputs, *args, **kwargs)
        batches = [] if self._losses else self._joined()
        del self._batches[0]
        if len(batches) == 1:
            return own(inputs, *args, **kwargs)
        if batches:
            self._step = JoinedStep(
                lambda k: own(batches[k], *args, **kwargs),
                len(batches),
                partial(compute, self.pipe),
                self._state,
            )
            try:
                with one_backward(self.accelerator):
                    self._losses = self._step.losses()
            finally:
                self._step = None
            # They are on their device, and are not read again.
            self._prepared = []
        return self._losses.pop(0)

    def _joined(self) -> list[Any]:
        """The mini-batches, from the next one on, that go through the pipeline in one call."""
        rows, most = 0, self._most if self._can_join else 1
        for count, batch in enumerate(self._batches, 1):
            collated = self._collated.get(id(batch))
            rows += len(collated.parts) if collated else rows_of(batch)
            if count in (most, DEEPEST) or (most is None and rows >= self.pipe.chunks):
                return self._batches[:count]
        return [*self._batches]

    def _state(self) -> list[Any]:
        """The objects in the Trainer's attributes, and in lists and dicts there."""
        own = ("_collated", "_prepared", "_batches", "_losses", "_step")
        found = [(key, x) for key, x in vars(self).items() if key not in own]
        within = [[*x.values()] if isinstance(x, dict) else x for _, x in found]
        lists = [x for x in within if isinstance(x, list | tuple | set | deque)]
        return [*chain(*found), *chain(*lists)]

    @property
    def _can_join(self) -> bool:
        """Whether mini-batches may be computed together: code of their own may forbid it."""
        above: Any = super()
        return (
            is_of_library(above.training_step)
            and above._prepare_inputs.__func__ is transformers.Trainer._prepare_inputs
            # They update their statistics once for each call.
            and not any(
                isinstance(x, DeferredBatchNorm | OncePerMiniBatch) for x in self.pipe.modules()
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
        called = self._called(model, not needed)
        return above.compute_loss(called, inputs, return_outputs, *args, **kwargs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer's class does, on the devices of the model.

        In half precision it would bring the whole model to one device.
        """
        above: Any = super()
        before = self._collated, self._prepared

        def take(batch: Any) -> Any:
            self._collated, self._prepared = {}, []
            return self._without_parts(batch)

        try:
            with unmoved(self.pipe.module):
                return above.evaluation_loop(Loader(dataloader, take), *args, **kwargs)
        finally:
            self._collated, self._prepared = before

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Predict a mini-batch, as the Trainer's class does, by the wrapper."""
        above: Any = super()
        return above.prediction_step(self._called(model, False), *args, **kwargs)

    def _called(self, model: Any, alone: bool) -> Any:
        """The object to call in place of the model; another model is called itself."""
        if type(model) is PipelinedModel or self.accelerator.unwrap_model(model) is not self.model:
            return model

        def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # Mini-batches may have a tensor in common.
            counts = [x.count_in(kwargs) for x in self._prepared]
            most = max(counts, default=0)
            parts = self._prepared[counts.index(most)].divided(args, kwargs) if most else []
            names, device = self.label_names, self.args.device
            # A function of the loss takes the outputs, and not the model's loss.
            is_own = getattr(self, "compute_loss_func", None) is not None
            strict = None if is_own else not self._accepts
            made = ModelCall(args, kwargs, parts, names, device, alone, strict)
            if self._step is not None:
                return self._step.call(made)
            return compute(self.pipe, [made])[0]

        return PipelinedModel(self.pipe, call)


def rows_of(batch: Any) -> int:
    """The number of rows of a mini-batch; 1 if nothing tells."""
    return row_count({**batch} if isinstance(batch, Mapping) else batch) or 1


def is_of_library(method: Any) -> bool:
    """Whether a method is that of Transformers or TRL, and not of a user's class."""
    return method.__func__.__module__.partition(".")[0] in ("transformers", "trl")


@contextmanager
def unmoved(model: Any) -> Iterator[None]:
    """Have ``model.to()`` change the dtype alone within a ``with`` block."""
    to = model.to
    vars(model)["to"] = lambda *_, dtype=None, **__: model if dtype is None else to(dtype=dtype)
    try:
        yield
    finally:
        del vars(model)["to"]


def verify(arguments: Any) -> None:
    """Check the arguments of a Trainer.

    Raises:
        ValueError: they ask for something that a pipeline does in another way.
    """
    refused = {
        "torch_compile": "compile the modules that the device map names, by module.compile()",
        "fsdp": "a pipeline spreads the model already; leave it out",
        "deepspeed": "a pipeline spreads the model already; leave it out",
    }
    for name, remedy in refused.items():
        value = getattr(arguments, name, None)
        if value:
            raise ValueError(f"a pipelined Trainer takes no {name} ({name}: {value}); {remedy}")
