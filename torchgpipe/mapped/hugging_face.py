"""Models of Hugging Face: the map by which Accelerate has dispatched one, caches, and adapters.

``from_pretrained(..., device_map="auto")`` dispatches a model. Caches are for models that write
text: in training they take memory, and they cannot be joined.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any

from torch import Tensor, nn

from torchgpipe.ambient.notes import warn
from torchgpipe.devices.streams import CPU, Device, accelerators

__all__: list[str] = []


#: The label that losses leave out: ``ignore_index`` of PyTorch, which Transformers uses, too.
IGNORED = -100


def base_of(model: nn.Module) -> Any:
    """The model without the adapters that PEFT may have put around it."""
    return getattr(model, "get_base_model", lambda: model)()


def takes_cache(model: nn.Module) -> bool:
    """Whether a model has a keyword ``use_cache``, as models of Transformers do."""
    forward = inspect.signature(model.forward)
    return "use_cache" in forward.parameters or (
        any(x.kind is x.VAR_KEYWORD for x in forward.parameters.values())
        and any(hasattr(x, "use_cache") for x in _configs(getattr(model, "config", None)))
    )


def _configs(config: Any) -> Iterator[Any]:
    """A config and all objects within, as those of the models that a model is composed of."""
    waiting, seen = [config], set()
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Mapping):
            waiting += x.values()
        elif isinstance(x, list | tuple):
            waiting += x
        elif not isinstance(x, type | Tensor | nn.Module) and hasattr(x, "__dict__"):
            yield x
            waiting += vars(x).values()


def without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments that turn caches off, unless they say something else."""
    return kwargs if kwargs.get("use_cache") is not None else {**kwargs, "use_cache": False}


def without_cache_of(output: Any) -> Any:
    """An output without a cache, which a model returns if it was given one, as by prefix tuning."""
    if not isinstance(output, dict) or output.get("past_key_values") is None:
        return output
    return type(output)(**{key: x for key, x in output.items() if key != "past_key_values"})


def map_of_accelerate(model: nn.Module) -> dict[str, Device]:
    """The device map by which Accelerate has dispatched a model.

    On a machine without accelerators, where ``device_map="balanced"`` dispatches none, it is
    :func:`on_cpu`.

    Raises:
        ValueError: the model has no device map, and there are accelerators.
    """
    device_map: Any = getattr(model, "hf_device_map", None)
    if not device_map and not accelerators():
        return on_cpu(model)
    if not device_map:
        raise ValueError(
            "a device map must be given for a model that Accelerate has not dispatched (model: "
            f"{type(model).__name__}); pass the devices by the names of modules, or 'auto'"
        )
    return dict(device_map)


def on_cpu(model: nn.Module) -> dict[str, Device]:
    """The device map of a model on a machine without accelerators, with a warning."""
    warn(
        "a model is on the CPU alone, since this machine has no accelerators to spread it over "
        f"(model: {type(model).__name__}); it trains all the same. To cut it here, too, name 'cpu' "
        "several times, in devices or a device map. If the CPU is what you mean, silence this by "
        "warnings.filterwarnings('ignore', 'a model is on the CPU alone')"
    )
    return {"": CPU}


def verify_all_there(model: nn.Module) -> None:
    """Check that Accelerate has offloaded no module.

    Raises:
        ValueError: modules are offloaded to the CPU or to disk.
    """
    offloaded = [
        name
        for name, module in model.named_modules()
        for hook in _hooks(module)
        if getattr(hook, "offload", False)
    ]
    device_map: Any = getattr(model, "hf_device_map", None) or {}
    offloaded += [name for name, device in device_map.items() if device == "disk"]
    if offloaded:
        raise ValueError(
            "the modules of a pipeline must stay on their devices, so none can be offloaded "
            f"(offloaded: {[*dict.fromkeys(offloaded)][:10]}); take more devices"
        )


def release(model: nn.Module) -> None:
    """Remove the hooks of Accelerate, which would take tensors back to the devices of its map."""
    for module in model.modules():
        if _hooks(module):
            hooks = import_module("accelerate.hooks")
            if isinstance(module.forward, partial):
                hooks.remove_hook_from_module(module)
            else:
                # Removing the hook would bring back the forward from before Accelerate, and drop
                # what other code has wrapped it in since. So an empty hook takes its place.
                module._hf_hook = hooks.ModelHook()


def verify_trainer() -> None:
    """Check that no plain Trainer is the caller: it would take the micro-batches' losses for one.

    Autograd would only say that it needs a scalar. Trainers with a loss of their own may call.

    Raises:
        RuntimeError: a plain Trainer calls the wrapper.
    """
    kind: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    plain = getattr(kind, "compute_loss", None)
    code = getattr(plain, "__code__", None)
    frame: FrameType | None = sys._getframe(1) if code else None
    while frame and frame.f_code is not code:
        frame = frame.f_back
    trainer: Any = frame.f_locals["self"] if frame else None
    if (
        trainer
        and type(trainer).compute_loss is plain
        and not (trainer.label_smoother or trainer.compute_loss_func)
    ):
        name = type(trainer).__name__
        raise RuntimeError(
            "a Trainer needs the loss of the mini-batch, and a wrapper returns those of its "
            f"micro-batches (Trainer: {name}); use the class "
            f"torchgpipe.transformers.pipelined({name})"
        )


def bring_adapters_home(model: nn.Module) -> None:
    """Bring the adapters of PEFT to the weights that they will be merged into.

    The weight of a tied head may be at home on another device than the head and its adapter.
    """
    for module in model.modules():
        base: Any = getattr(module, "base_layer", None)
        has_base = isinstance(base, nn.Module)
        weight: Any = next(base.parameters(), None) if has_base else None
        for x in module.parameters() if weight is not None else ():
            if x.device != weight.device:
                x.data = x.data.to(weight.device)


def _hooks(module: nn.Module) -> list[Any]:
    hook: Any = getattr(module, "_hf_hook", None)
    return [hook, *getattr(hook, "hooks", ())] if hook is not None else []
