"""Trainers for wrapped models: they see the model itself, and call the wrapper."""

from __future__ import annotations

import copyreg
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

try:
    import transformers
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
except ImportError as error:
    raise ImportError(
        "torchgpipe.transformers needs Transformers (not installed: transformers); run: "
        "pip install torchgpipe[transformers]"
    ) from error

from torch import nn

from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.transformers.model import PipelinedModel

__all__: list[str] = []


@cache
def pipelined(trainer: type) -> Any:
    """Make a Trainer's class train a wrapped model.

    ::

        trainer = pipelined(Trainer)(model=MappedGPipe(model, device_map, chunks=8), args=args, ...)

    The Trainer sees the model itself: ``trainer.model`` is ``pipe.module``, and its class, its
    configuration, its labels and its files are the plain model's. Losses and predictions are
    computed by the wrapper. The loss is that of the whole mini-batch (see
    :mod:`torchgpipe.transformers.model`), on the device of the inputs.

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        #: The wrapper.
        self.pipe: MappedGPipe
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

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer's class does, on the devices of the model.

        In half precision it would bring the whole model to one device.
        """
        above: Any = super()
        with unmoved(self.pipe.module):
            return above.evaluation_loop(*args, **kwargs)

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Predict a mini-batch, as the Trainer's class does, by the wrapper."""
        above: Any = super()
        return above.prediction_step(self._called(model, False), *args, **kwargs)

    def _called(self, model: Any, alone: bool) -> Any:
        """The object to call in place of the model; another model is called itself."""
        if type(model) is PipelinedModel or self.accelerator.unwrap_model(model) is not self.model:
            return model
        return PipelinedModel(
            self.pipe, self.label_names, shifts_labels(self.model), self.args.device, alone
        )


@contextmanager
def unmoved(model: Any) -> Iterator[None]:
    """Have ``model.to()`` change the dtype alone within a ``with`` block."""
    to = model.to
    vars(model)["to"] = lambda *_, dtype=None, **__: model if dtype is None else to(dtype=dtype)
    try:
        yield
    finally:
        del vars(model)["to"]


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss of a model compares each label with the output in front of it.

    The library's loss for causal models does. Some models, as BART's decoder alone, are of that
    kind by their names, and compute another loss in their own code.
    """
    base = getattr(model, "get_base_model", lambda: model)()
    causal = LOSS_MAPPING.get(str(getattr(base, "loss_type", None))) is ForCausalLMLoss
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    calls_it = code is not None and "loss_function" in code.co_names
    encodes = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return causal and calls_it and not encodes


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
