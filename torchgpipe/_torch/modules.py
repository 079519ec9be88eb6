"""The modules of a model, found faster than by PyTorch, which names each on the way."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__: list[str] = []


def modules_of(root: nn.Module) -> list[nn.Module]:
    """All modules that a module consists of, itself included, as ``root.modules()`` has them."""
    found: dict[nn.Module, None] = {}
    waiting = [root]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            if children := module._modules:
                waiting += [x for x in reversed(children.values()) if x is not None]
    return [*found]


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters of modules, each once, as ``root.parameters()`` has those of its modules."""
    found = [x for module in modules for x in module._parameters.values() if x is not None]
    return [*dict.fromkeys(found)]
