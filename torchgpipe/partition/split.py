"""Partitions: the layers of a sequential module, cut into pieces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from torchgpipe.ambient import labels
from torchgpipe.ambient.notes import after_layer
from torchgpipe.ambient.notes import layer as current

__all__: list[str] = []


class Sequential(nn.Sequential):
    """An :class:`nn.Sequential` whose first layer takes all arguments of the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not args and kwargs.keys() == {"input"}:
            # A caller may pass the argument of nn.Sequential.forward() by its name, `input`.
            args, kwargs = (kwargs["input"],), {}
        output = None
        for layer in self:
            output = layer(*args, **kwargs)
            args, kwargs = (output,), {}
        return output


class Partition(nn.Sequential):
    """Some neighbouring layers, in order. The first layer takes all arguments of the call."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A compiled partition must not depend on `then` or the observer: they change between runs.
        then, is_observed = None, False
        if not is_compiling():
            then = after_layer.then
            is_observed = labels.observer is not None
        output = None
        for name, layer in self._modules.items():
            assert layer is not None
            current.name, current.kind = name, type(layer).__name__
            if is_observed:
                labels.put_layer(name, type(layer).__name__)
            output = layer(*args, **kwargs)
            if then is not None:
                then()
            args, kwargs = (output,), {}
        current.name = None
        if is_observed:
            labels.put_layer("", "")
        return output


def verify_module(module: nn.Module) -> None:
    """Check that a module is made of nothing but layers in a sequence.

    Raises:
        TypeError: the module is not an :class:`nn.Sequential`, or it has something besides its
            layers that the partitions would be without.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be an nn.Sequential, since its layers are what is distributed over the "
            f"partitions (module: {type(module).__name__}); pass nn.Sequential(*layers) with "
            "the layers in the order in which forward calls them"
        )
    forwards = (nn.Sequential.forward, Sequential.forward)
    extras = {
        "a forward": getattr(module.forward, "__func__", None) not in forwards,
        "parameters": module._parameters,
        "buffers": module._buffers,
        "hooks": any(value for key, value in vars(module).items() if key.endswith("_hooks")),
        "compile()": module._compiled_call_impl,
    }
    present = [name for name, has in extras.items() if has]
    if present:
        raise TypeError(
            "module must have nothing of its own besides its layers, since the partitions would "
            f"be without it (module: {type(module).__name__}, own: {', '.join(present)}); give it "
            "to a layer, and pass nn.Sequential(*module)"
        )


def split_module(module: nn.Sequential, balance: Sequence[int]) -> list[Partition]:
    """Split a sequential module into partitions.

    Layers keep their names, and partitions take the training flag of the module.
    """
    layers = iter(module._modules.items())
    partitions = []
    for size in balance:
        partition = Partition(OrderedDict(next(layers) for _ in range(size)))
        partition.training = module.training
        partitions.append(partition)
    return partitions


def own_key(key: str, prefixes: Mapping[str, str | None]) -> str | None:
    """Translate a key of a state dict, of the plain module or any wrapper, to the wrapper's own.

    Args:
        key: the key.
        prefixes: the start of the wrapper's keys of each layer, by the layer's name; None for
            layers of other processes, whose keys are left out.
    """
    path = key.split(".")
    if path[0] == "partitions" and len(path) > 2 and path[1].isdecimal() and path[2] in prefixes:
        path = path[2:]
    own_prefix = prefixes.get(path[0], "")
    return None if own_prefix is None else own_prefix + ".".join(path)


def rename(state_dict: dict[str, Any], prefix: str, prefixes: Mapping[str, str | None]) -> None:
    """Give a state dict a wrapper's own keys, which start with a prefix: see :func:`own_key`."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        new = own_key(key[len(prefix) :], prefixes)
        if new is None:
            del state_dict[key]
        # If the new key is there already, the old one stays, and is reported as unexpected.
        elif prefix + new not in state_dict:
            state_dict[prefix + new] = state_dict.pop(key)


def plain_module(layers: Mapping[str, Any]) -> nn.Sequential:
    """The plain module of layers, by their names.

    That is an :class:`nn.Sequential`, which tools know. It passes on one argument, so a first layer
    that takes several gets a :class:`Sequential` of ours.
    """
    first = next(iter(layers.values()), None)
    kind = nn.Sequential if first is None or _takes_one(first) else Sequential
    return kind(OrderedDict(layers))


def _takes_one(layer: nn.Module) -> bool:
    try:
        (parameter,) = signature(layer.forward).parameters.values()
    except ValueError:
        # forward() has several parameters, or no signature.
        return False
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD
