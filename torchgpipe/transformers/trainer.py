"""Trainers for wrapped models: they see the model itself, and call the wrapper, for one loss."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "torchgpipe.transformers needs Transformers (not installed: transformers); run: "
        "pip install torchgpipe[transformers]"
    ) from error

import torch
from torch import Tensor, nn

from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.transformers.counting import (
    IGNORED,
    counts_of,
    ctc_reduction,
    ignored_pixels,
    shares_of,
    shifts_labels,
    told,
    whole,
)
from torchgpipe.values.division import division_of
from torchgpipe.values.marks import Chunks
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


@cache
def pipelined(trainer: type) -> Any:
    """Make a Trainer's class train a wrapped model.

    ::

        trainer = pipelined(Trainer)(model=MappedGPipe(model, device_map, chunks=8), args=args, ...)

    The Trainer sees the model itself: ``trainer.model`` is ``pipe.module``, and its class, its
    configuration, its labels and its files are the plain model's. Losses and predictions are
    computed by the wrapper. The loss is that of the whole mini-batch, on the device of the inputs.

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


# The model that a Trainer calls: calls go through the pipeline, all else is the model's.


class PipelinedModel:
    """A stand-in for the wrapped model: calls go to the wrapper, and return one loss.

    Its class and its attributes are those of the model, since trainers look at both.

    Args:
        pipe: the wrapper.
        names: the arguments that are labels.
        shifted: whether the first label in each row counts nowhere.
        device: where the loss goes to.
        alone: whether the loss alone is used. Otherwise the other outputs go to ``device``, too.
    """

    _pipe: MappedGPipe
    _names: Sequence[str]
    _shifted: bool
    _device: torch.device
    _alone: bool

    def __init__(
        self,
        pipe: MappedGPipe,
        names: Sequence[str],
        shifted: bool,
        device: torch.device,
        alone: bool,
    ) -> None:
        # Assigned attributes would be the model's.
        self.__dict__.update(
            _pipe=pipe, _names=names, _shifted=shifted, _device=device, _alone=alone
        )

    # The type checker does not allow a property for the class of an object.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._pipe.module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._pipe.module, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, micro-batch by micro-batch.

        Args:
            *args: the arguments of the model.
            **kwargs: the same. ``num_items_in_batch`` is the number of labels in all mini-batches
                of a step.

        Returns:
            The model's output, joined. What has no dimension, as the loss, is that of the
            mini-batch.
        """
        pipe = self._pipe
        # Trainer has set the mode of the model.
        pipe.training = pipe.module.training
        items = kwargs.pop("num_items_in_batch", None)
        sizes = division_of((args, kwargs), pipe.chunks).sizes
        shifted = self._shifted and "shift_labels" not in kwargs
        reduction = ctc_reduction(pipe.module)
        labels = [] if reduction else self._labels(kwargs, sum(sizes))
        counts = counts_of(labels, sizes, shifted)
        if next(pipe.parameters(), counts).dtype == torch.float64:
            counts = counts.double()
        if items is not None:
            kwargs["num_items_in_batch"] = Chunks(told(counts, items))
        with loss_alone(pipe.module) if self._alone else nullcontext():
            output = pipe(*args, **kwargs)
        is_sum = reduction == "sum"
        shares = torch.ones_like(counts) if is_sum else shares_of(counts, alone=items is None)
        return self._finished(output, sizes, shares)

    def _finished(self, output: Any, sizes: Sequence[int], shares: Tensor) -> Any:
        """Combine the losses of all micro-batches into one, and move it to its device."""
        m, rows = len(sizes), sum(sizes)

        def finished(name: str, value: Any) -> Any:
            if isinstance(value, Tensor) and is_stacked(name, value, m, rows):
                return whole(value, shares).to(self._device)
            return value if self._alone else map_leaves(self._arrived, value)

        if isinstance(output, tuple):
            return tuple([finished("" if k else "loss", x) for k, x in enumerate(output)])
        if not isinstance(output, dict):
            return finished("", output)
        for name in [*output]:
            output[name] = finished(name, output[name])
        return output

    def _labels(self, kwargs: dict[str, Any], rows: int) -> list[Tensor]:
        if "shift_labels" in kwargs:
            return [kwargs["shift_labels"]]
        mask = kwargs.get("bool_masked_pos")
        found = [kwargs.get(name) for name in self._names if name != "bool_masked_pos"]
        ids = kwargs.get("input_ids")
        if isinstance(ids, Tensor) and any(name.endswith("_positions") for name in self._names):
            # An answer after the end of its row counts nowhere.
            found = [x if x is None else x.masked_fill(x >= ids.shape[1], IGNORED) for x in found]
        labels = [x for x in found if isinstance(x, Tensor) and x.dim() and len(x) == rows]
        pixels = ignored_pixels(self._pipe.module)
        labels = [x.masked_fill(x == pixels, IGNORED) if x.dim() > 2 else x for x in labels]
        # Labels that are truth values all count; those of a mask say what counts.
        labels = [x.int() if x.dtype == torch.bool else x for x in labels]
        if not isinstance(mask, Tensor):
            return labels
        # Of images as labels the masked patches count.
        return [mask, *(x for x in labels if not x.is_floating_point())]

    def _arrived(self, x: Any) -> Any:
        return x.to(self._device) if isinstance(x, Tensor) else x


def is_stacked(name: str, value: Tensor, m: int, rows: int) -> bool:
    """Whether an output has a number for each micro-batch, where the model returns one.

    Args:
        name: the name of the output.
        value: the output, joined.
        m: the number of micro-batches.
        rows: the number of rows, which an output of one dimension has otherwise.
    """
    one_each = value.shape == (m,) and value.is_floating_point()
    # Where each micro-batch has one row, the shape says nothing.
    return one_each and (m != rows or name.endswith("loss"))


@contextmanager
def loss_alone(model: nn.Module) -> Iterator[None]:
    """Have a model return its loss alone within a ``with`` block.

    The logits of all micro-batches, joined, would take more memory than anything else.
    """

    def alone(model: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, dict):
            return {"loss": output["loss"]} if "loss" in output else output
        return output[:1] if isinstance(output, tuple) else output

    handle = model.register_forward_hook(alone)
    try:
        yield
    finally:
        handle.remove()
