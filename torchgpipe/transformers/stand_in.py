"""The model that a Trainer calls: calls go through the pipeline, and all else is the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

__all__: list[str] = []


#: The model comes to its devices before these methods, which call it, or return a module of it.
PLACING = "generate", "get_input_embeddings", "get_output_embeddings"


class PipelinedModel:
    """A stand-in for a model: its calls go through the pipeline, and return one loss.

    Its class and its attributes are those of the model, since trainers look at both. An attribute
    that is assigned becomes the model's, but for ``forward``: whoever replaces that for a call, as
    TRL does for distillation, wants it to be called with the arguments as they are.

    Args:
        model: the model.
        call: takes the module to call, the model or a part of it, and the arguments.
        place: brings the model to its devices, if it is not there yet.
    """

    _model: nn.Module
    _call: Callable[..., Any]
    _place: Callable[[], Any]

    def __init__(
        self, model: nn.Module, call: Callable[..., Any], place: Callable[[], Any]
    ) -> None:
        # By ``__setattr__``, ``self._model = ...`` would set an attribute of the model.
        self.__dict__.update(_model=model, _call=call, _place=place)

    # isinstance() takes a stand-in for what its model is. Mypy allows no property of this name.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._model)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        # Who asks for a part of the model will call it, so first the model comes to its devices.
        if name in PLACING or isinstance(value, nn.Module):
            self._place()
        # A loss that reads the head's weight calls ``base_model``: this call is pipelined, too.
        if name == "base_model" and isinstance(value, nn.Module) and value is not self._model:
            return PipelinedModel(value, self._call, self._place)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "forward":
            setattr(self._model, name, value)
        elif value == self._pipelined:
            self.__dict__.pop(name, None)
        else:
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        delattr(self._model, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._model, memo)

    def __reduce__(self) -> Any:
        return _itself, (self._model,)

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
        return self.forward(*args, **kwargs)

    def _pipelined(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._model, args, kwargs)

    @property
    def forward(self) -> Callable[..., Any]:
        """The same as a call."""
        forward: Callable[..., Any] = self.__dict__.get("forward", self._pipelined)
        return forward


def _itself(model: nn.Module) -> nn.Module:
    return model
