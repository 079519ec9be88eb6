"""Functions: errors in backward of a user's ``torch.autograd.Function`` on several devices.

PyTorch applies such a function without asking a mode, so nothing brings its tensors together. Its
forward may combine them all the same, since each operator within is asked for. Its backward may
not, and what PyTorch says then names neither the function nor a remedy.

The graph of the first step shows whether there is such a function between mapped modules.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

__all__: list[str] = []


def watch(outputs: Iterable[Tensor]) -> bool:
    """Have functions that got tensors of several devices say so if their backward fails.

    Args:
        outputs: the outputs of a micro-batch.

    Returns:
        Whether there are any.
    """
    found = False
    waiting: list[Node] = [x.grad_fn for x in outputs if x.grad_fn is not None]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        edges = [(x, k) for x, k in node.next_functions if x is not None]
        if isinstance(node, BackwardCFunction) and "apply" not in vars(node):
            function: Any = type(node)._forward_cls
            devices: list[torch.device] = [x._input_metadata[k].device for x, k in edges]
            if len({*devices}) > 1 and function.__module__.split(".")[0] != "torchgpipe":
                found = True
                node.apply = _telling(weakref.ref(node), function, devices)
        following = {x for x, _ in edges} - seen
        seen |= following
        waiting += following
    return found


def _telling(
    node: Callable[[], Any], function: Any, devices: Sequence[torch.device]
) -> Callable[..., Any]:
    """Wrap the ``apply`` of a node, to explain an error about devices.

    The wrapper must not refer to the node, since the node refers to the wrapper.
    """

    def apply(*grads: Any) -> Any:
        this = node()
        try:
            found = type(this).apply(this, *grads)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            place = extract_tb(error.__traceback__)[-1]
            line = f"{place.filename}:{place.lineno}"
            raise _apart("combines them", function, line, devices) from error
        given = found if isinstance(found, tuple) else (found,)
        wanted = [x for x, needed in zip(given, this.needs_input_grad) if needed]
        for x, device in zip(wanted, devices):
            # PyTorch itself copies 0-dimensional tensors.
            if isinstance(x, Tensor) and x.dim() and x.device != device:
                code = function.backward.__code__
                line = f"{code.co_filename}:{code.co_firstlineno}"
                what = f"returns a gradient on {x.device} for a tensor on {device}"
                raise _apart(what, function, line, devices)
        return found

    return apply


def _apart(what: str, function: type, line: str, devices: Iterable[torch.device]) -> RuntimeError:
    """The error of a function whose backward fails on its devices."""
    places = ", ".join(dict.fromkeys(map(str, devices)))
    return RuntimeError(
        "a torch.autograd.Function between the modules of a device map gets its tensors where they "
        f"are, and the backward of this one {what} (function: {function.__name__}, line: {line}, "
        f"devices: {places}); bring its tensors together in front of it by .to(), or apply it in a "
        "module of the map (docs/device_map.rst)"
    )
