"""The model that a Trainer calls: calls go through the pipeline, and all else is the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchgpipe.mapped_gpipe import MappedGPipe

__all__: list[str] = []


class PipelinedModel:
    """A stand-in for the wrapped model: calls go to the wrapper, and return one loss.

    Its class and its attributes are those of the model, since trainers look at both.

    Args:
        pipe: the wrapper.
        call: takes the arguments of a call, and returns the model's output for them.
    """

    _pipe: MappedGPipe
    _call: Callable[[tuple[Any, ...], dict[str, Any]], Any]

    def __init__(
        self, pipe: MappedGPipe, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    ) -> None:
        # Assigned attributes would be the model's.
        self.__dict__.update(_pipe=pipe, _call=call)

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
        return self._call(args, kwargs)
