"""Trainers whose models are on several devices: they see the models, and call their stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from weakref import WeakMethod

from torch import nn
from transformers import TrainingArguments

from torchgpipe.devices.streams import Device
from torchgpipe.mapped.slice_lengths import Slices
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.partition.arguments import checked_count
from torchgpipe.partition.keeping import Keeping
from torchgpipe.transformers.spread import Options, Spread, follow, keep_in_place
from torchgpipe.transformers.stand_in import PipelinedModel

__all__: list[str] = []


#: A Trainer's attributes for models that the trained one is compared with: they are spread, too.
REFERENCES = "ref_model", "teacher_model"


def in_step(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method get the stand-in in place of the model, also as ``self.model``."""

    @wraps(method)
    def within(self: SpreadTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            type(model) is not PipelinedModel
            and self.accelerator.unwrap_model(model) is self._model
        ):
            model = self._stand_in
        with self._standing():
            return method(self, model, *args, **kwargs)

    return within


class SpreadTrainer:
    """A mixin for Trainers whose models are spread over devices.

    The Trainer's model is the plain one, and within a step its stand-in. Models that it compares
    with are always stand-ins.

    Args:
        *args: the Trainer's own arguments; wrappers among them stand for their models.
        devices: as in :func:`~torchgpipe.transformers.pipelined`.
        chunks: the same.
        checkpoint: the same.
        slices: the same.
        **kwargs: the Trainer's own arguments.
    """

    args: Any
    accelerator: Any
    optimizer: Any
    #: Whether a step runs, in which ``self.model`` is the stand-in.
    _is_in_step = False
    _model: nn.Module | None = None
    #: The Trainer's model, and its wrapper, which is made when the model is called first.
    _spread: Spread
    #: What stands for the Trainer's model in a step. A call of it goes through the wrapper.
    _stand_in: PipelinedModel
    #: Whether ``_adopt`` has made ``_spread`` and ``_stand_in``.
    _is_made = False
    # With these values the Trainer neither moves the model nor copies it to all GPUs.
    place_model_on_device = property(lambda _: False, lambda *_: None)
    is_model_parallel = property(lambda _: True, lambda *_: None)

    def __init__(
        self,
        *args: Any,
        devices: int | Sequence[Device] | None = None,
        chunks: int | None = None,
        checkpoint: Keeping | Sequence[Keeping] | None = None,
        slices: Slices | None = None,
        **kwargs: Any,
    ) -> None:
        if chunks is not None:
            remedy = "by default there are two for each device"
            chunks = checked_count(chunks, "chunks", "micro-batches of a step", remedy)
        self._options = Options(devices, chunks, checkpoint, slices)
        #: For each model that the user passed within a wrapper, the wrapper.
        self._wrappers: dict[nn.Module, MappedGPipe] = {}
        values = [self._unwrapped(x) for x in args]
        named = {key: self._unwrapped(x) for key, x in kwargs.items()}
        for x in (*values, *named.values()):
            verify(x)
        super().__init__(*values, **named)
        verify(self.args)
        self._adopt()

    def __init_subclass__(cls) -> None:
        # Where subclasses override methods that get the model, these methods get its stand-in, too.
        for name in {"training_step", "compute_loss", "prediction_step"} & vars(cls).keys():
            setattr(cls, name, in_step(vars(cls)[name]))

    def _unwrapped(self, value: Any) -> Any:
        """The model of a wrapper, which is remembered; other values as they are."""
        if not isinstance(value, MappedGPipe):
            return value
        self._wrappers[value.module] = value
        keep_in_place(value.module, value.hf_device_map)
        return value.module

    def _adopt(self) -> None:
        """Have the Trainer's model, and those that it compares with, spread over the devices."""
        model: Any = self._model
        if self._is_made and self._spread.model is model:
            return
        within = {*model.modules()} - {model}
        if lost := [type(x).__name__ for x in self._wrappers if x in within]:
            raise ValueError(
                "a Trainer must train the model that was wrapped (wrapped: "
                f"{lost}, trained: {type(model).__name__}); pass the plain model, which is wrapped "
                "then, or give it its adapters first"
            )
        wrapper, settings = self._wrappers.get(model), [x for x in self._options if x is not None]
        if wrapper is not None and settings:
            raise ValueError(
                "devices, chunks, checkpoint and slices are for a model that is not wrapped yet "
                f"(model: MappedGPipe, given: {settings}); pass them to MappedGPipe, or the model"
            )
        self._spread = Spread(model, self._options, wrapper, moved=weakly(self._followed))
        self._stand_in = self._standing_in(self._spread)
        self._is_made = True
        for key, x in [*vars(self).items()]:
            if not isinstance(x, nn.Module) or x is model:
                continue
            if key in REFERENCES or x in self._wrappers:
                spread = Spread(x, self._options, self._wrappers.get(x), like=self._spread)
                setattr(self, key, self._standing_in(spread))

    def _standing_in(self, spread: Spread) -> PipelinedModel:
        return PipelinedModel(spread.model, partial(weakly(self._called), spread), spread.made)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Have the stand-in be the Trainer's model within a ``with`` block."""
        outer, self._is_in_step = self._is_in_step, True
        try:
            yield
        finally:
            self._is_in_step = outer

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        # TRL's constructor calls this for the reference model, before ``_adopt`` makes stand-ins.
        above: Any = super()
        self._adopt()
        with self._standing():
            return above._precompute_ref_logps(*args, **kwargs)

    def _followed(self, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Have the optimizer follow the parameters to their devices."""
        if self.optimizer is not None:
            follow(self.optimizer, moved)

    @property
    def pipe(self) -> MappedGPipe | None:
        """The wrapper; None before the first call of a model that was not wrapped."""
        return self._spread.pipe

    @property
    def model(self) -> Any:
        """The model; within a step its stand-in, whose calls go through the pipeline."""
        return self._stand_in if self._is_in_step else self._model

    @model.setter
    def model(self, model: Any) -> None:
        if type(model) is not PipelinedModel and model is not self._model:
            self._model = model
            if self._is_made:
                self._adopt()

    @property
    def model_wrapped(self) -> Any:
        """The same: a model that is spread is wrapped in nothing."""
        return self.model

    @model_wrapped.setter
    def model_wrapped(self, _: Any) -> None:
        pass

    def call_model_init(self, trial: Any = None) -> nn.Module:
        above: Any = super()
        model: nn.Module = self._unwrapped(above.call_model_init(trial))
        return model

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer's class does, on the devices of the model.

        In half precision it would bring the whole model to one device.
        """
        above: Any = super()
        with unmoved(self._spread.model):
            return above.evaluation_loop(*args, **kwargs)

    @in_step
    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Predict a mini-batch, as the Trainer's class does, by the wrapper."""
        above: Any = super()
        return above.prediction_step(model, *args, **kwargs)

    def _called(
        self, spread: Spread, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a model, or a part of it, through the pipeline."""
        raise NotImplementedError


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method by a weak reference: stand-ins must not keep their Trainer and its models."""
    reference = WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        assert bound is not None
        return bound(*args, **kwargs)

    return call


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
    """Check arguments, if they are those of a Trainer.

    Raises:
        ValueError: they ask for something that a pipeline does in another way.
    """
    if not isinstance(arguments, TrainingArguments):
        return
    refused = {
        "torch_compile": "compile the modules of the model, by module.compile()",
        "fsdp": "a pipeline spreads the model already; leave it out",
        "deepspeed": "a pipeline spreads the model already; leave it out",
    }
    for name, remedy in refused.items():
        value = getattr(arguments, name, None)
        if value:
            raise ValueError(f"a pipelined Trainer takes no {name} ({name}: {value}); {remedy}")
