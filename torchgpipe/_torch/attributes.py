"""Private attributes of PyTorch's objects: operators, tensors, modules, selective checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module

from torchgpipe import _torch

__all__: list[str] = []


GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)

aten = torch.ops.aten
#: Operators that view a tensor in another shape, and fail if its strides allow no such view. In
#: graphs ``aten.reshape``, which then copies, replaces them where nobody changes the memory.
VIEWS = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}


def schema_of(operator: Any) -> Any:
    """The declaration of an operator's arguments and results; None for other functions."""
    return getattr(operator, "_schema", None)


def has_global_hooks() -> bool:
    """Whether hooks run around all modules of the process."""
    return any(getattr(module, name, None) for name in GLOBAL_HOOKS)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, which views share; fake tensors have one, too."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


# The modules of a model, found faster than by ``modules()``, which also makes a name for each.


def modules_of(root: nn.Module) -> list[nn.Module]:
    """All modules that a module consists of, itself included, as ``root.modules()`` has them."""
    modules: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in modules:
            modules[module] = None
            if children := module._modules:
                waiting += [x for x in reversed(children.values()) if x is not None]
    return [*modules]


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules, each once, as ``root.parameters()`` has those of its modules."""
    parameters = [x for module in modules for x in module._parameters.values() if x is not None]
    return [*dict.fromkeys(parameters)]


# Memory that belongs to one tensor alone: no other tensor sees a change of it in place.


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor has contiguous memory of its own, which nobody else can write to."""
    # A subclass may have its memory in tensors that it wraps.
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return False
    storage = tensor.untyped_storage()
    # Memory that is not resizable was not allocated by PyTorch, and others may use it.
    return (
        tensor.is_contiguous()
        and storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and _torch.count_uses(storage._cdata) == _uses_of_one()
        # With the conjugate or negative bit, memory has other values than the tensor.
        and not (tensor.is_conj() or tensor.is_neg())
    )


@cache
def _uses_of_one() -> int:
    """The number of uses that memory of one tensor has while somebody asks."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    uses: int = _torch.count_uses(storage._cdata)
    return uses


# Selective checkpoints: in the first run (forward), a dispatch mode of PyTorch's asks the policy
# what to keep. If the mode lacks an attribute that is used here, it is left as it is.


def keeps_results(mode: Any) -> bool:
    """Whether a context manager is PyTorch's mode for a first run, with all that is used here."""
    known = hasattr(mode, "policy_fn") and hasattr(mode, "storage")
    return known and isinstance(mode, _torch.KeepingMode)


def bypass_hooks(mode: Any) -> None:
    """Have a mode keep its results out of the hooks for saved tensors, which are a checkpoint's.

    That is what it does before PyTorch 2.14, which warns where nobody has said which way to go.
    """
    mode.respect_saved_tensors_hooks = False


def judge_by(mode: Any, judge: Callable[..., Any]) -> None:
    """Have a mode ask a function, which gets the mode's own policy first.

    Before PyTorch 2.13 the mode of the recomputation asks, too; from then on it does not.
    """
    policy = getattr(mode, "policy_fn", None)
    if policy is not None:

        def asked(*args: Any, **kwargs: Any) -> Any:
            return judge(policy, *args, **kwargs)

        mode.policy_fn = asked
