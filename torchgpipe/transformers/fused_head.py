"""TRL's fused head in the pipeline: on the head's device, and under its checkpoint mode.

TRL gives a causal model a forward that calls all but the head, and computes the log-probabilities
of labels from the weight of the head, without a call of it::

    forward(fused_lm_head=True)    base_model(…) ── log_probs(hidden_states, lm_head.weight, labels)

Under a device map that would be code between modules, which computes where the weight is at home,
and keeps what it saves for backward. So the code behind ``base_model`` is called within the head,
as any mapped module: there the weight is on the device of the head, and is computed again where
that is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any, NoReturn

from torch import nn

__all__: list[str] = []


def call_within_head(model: Any) -> bool:
    """Have the fused head of a model computed within its head; others stay as they are.

    Args:
        model: the model, without adapters.

    Returns:
        Whether TRL has given it a fused head. On GPUs it asks a device how many labels count, so
        the host waits for each micro-batch.
    """
    method: Any = vars(model).get("forward")
    fused = getattr(method, "__func__", None)
    names = getattr(getattr(fused, "__code__", None), "co_varnames", ())
    if hasattr(fused, "is_within_head"):
        return True
    if fused is None or "fused_lm_head" not in names:
        return False
    head: nn.Module = model.get_output_embeddings()
    plain = head.forward

    @wraps(plain)
    def within(*args: Any, behind: Any = None, **kwargs: Any) -> Any:
        if behind is None:
            return plain(*args, **kwargs)
        # ``behind`` is what the model without its head has returned: no need to compute it again.
        return fused(With(model, lambda *_, **__: behind), *args, **kwargs)

    @wraps(fused)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(self, *args, **kwargs)
        try:
            fused(With(model, _leave), *args, fused_lm_head=True, **kwargs)
        except LeftError as left:
            behind = model.base_model(*left.args, **left.kwargs)
        return head(*args, behind=behind, fused_lm_head=True, **kwargs)

    forward.is_within_head = True  # type: ignore[attr-defined]
    vars(head)["forward"] = within
    vars(model)["forward"] = MethodType(forward, model)
    return True


class With:
    """A model with something else in place of all but its head."""

    def __init__(self, model: nn.Module, base_model: Callable[..., Any]) -> None:
        self._model, self.base_model = model, base_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class LeftError(Exception):
    """Raised in place of the model without its head, to leave the forward there.

    It carries the arguments of that call.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.kwargs = args, kwargs


def _leave(*args: Any, **kwargs: Any) -> NoReturn:
    raise LeftError(args, kwargs)
