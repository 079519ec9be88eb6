"""Models that Accelerate has dispatched, as ``from_pretrained(..., device_map="auto")`` does."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import nn

from torchgpipe.devices.streams import Device

__all__: list[str] = []


def taken_over(model: nn.Module) -> dict[str, Device]:
    """Take a model over from Accelerate: return its device map, and remove Accelerate's hooks.

    Raises:
        ValueError: the model has no device map, or modules of it are offloaded.
    """
    device_map: Any = getattr(model, "hf_device_map", None)
    if not device_map:
        raise ValueError(
            "a device map must be given for a model that Accelerate has not dispatched (model: "
            f"{type(model).__name__}); pass the devices by the names of modules"
        )
    offloaded = [
        name
        for name, module in model.named_modules()
        for hook in _hooks(module)
        if getattr(hook, "offload", False)
    ]
    offloaded += [name for name, device in device_map.items() if device == "disk"]
    if offloaded:
        raise ValueError(
            "the modules of a pipeline must stay on their devices, so none can be offloaded "
            f"(offloaded: {[*dict.fromkeys(offloaded)][:10]}); take more devices"
        )
    if any(_hooks(module) for module in model.modules()):
        import_module("accelerate.hooks").remove_hook_from_submodules(model)
    return dict(device_map)


def _hooks(module: nn.Module) -> list[Any]:
    hook: Any = getattr(module, "_hf_hook", None)
    return [hook, *getattr(hook, "hooks", ())] if hook is not None else []
