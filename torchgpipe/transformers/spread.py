"""The models of a Trainer on their devices: wrappers that are made when a model is called first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.devices.streams import CPU, Device, accelerators
from torchgpipe.mapped.device_map import Wholes
from torchgpipe.mapped.hugging_face import base_of, on_cpu
from torchgpipe.mapped.slice_lengths import Slices
from torchgpipe.mapped_gpipe import MappedGPipe
from torchgpipe.partition.arguments import checked_count
from torchgpipe.partition.keeping import Keeping
from torchgpipe.planner.given import places_of
from torchgpipe.planner.maps import proposed
from torchgpipe.transformers.fused_head import call_within_head
from torchgpipe.values.structure import map_leaves

__all__: list[str] = []


#: A model whose weights are on the CPU has its blocks measured there, up to so many bytes. A larger
#: one would take minutes for a micro-batch, so its blocks are balanced by their bytes.
MEASURED = 2 * 2**30


class Options(NamedTuple):
    """The settings of devices and micro-batches; None for what the user leaves open."""

    devices: int | Sequence[Device] | None
    chunks: int | None
    checkpoint: Keeping | Sequence[Keeping] | None
    slices: Slices | None = None

    def places(self) -> list[torch.device]:
        """The devices.

        Raises:
            ValueError: there are accelerators, but fewer.
        """
        available = accelerators()
        if self.devices is None:
            return available or [CPU]
        if not isinstance(self.devices, int):
            return places_of(self.devices, are_one_each=False)
        remedy = "devices=None takes all of them"
        count = checked_count(self.devices, "devices", "accelerators, the first ones", remedy)
        if 0 < len(available) < count:
            raise ValueError(
                "there must be as many accelerators as a model is spread over (devices: "
                f"{count}, accelerators: {len(available)}); {remedy}"
            )
        return available[:count] or [CPU]


class Spread:
    """A model, and its wrapper, which is made by the arguments of the model's first call.

    Args:
        model: the model. Until it is called it stays where it was loaded.
        options: devices, chunks and checkpoint mode for the wrapper.
        pipe: the wrapper, if there is one already.
        moved: takes the parameters by what they were, when they have come to their devices.
        like: a model that is on its devices, or to come there, in the way that this one shall be
            spread, too, if it has the same modules.
    """

    def __init__(
        self,
        model: Any,
        options: Options,
        pipe: MappedGPipe | None = None,
        *,
        moved: Callable[[dict[nn.Parameter, nn.Parameter]], None] = lambda _: None,
        like: Spread | None = None,
    ) -> None:
        self.model, self.pipe = model, pipe
        self._options, self._moved, self._like = options, moved, like
        device_map: Any = getattr(model, "hf_device_map", None) or {}
        #: Whether Accelerate has spread the model, and the user names no other devices.
        self._is_dispatched = len({*device_map.values()}) > 1 and options.devices is None
        #: Whether a call of the model makes its thread wait for a device, as TRL's fused head does:
        #: then several threads issue work.
        self._waits = call_within_head(base_of(model))
        if pipe is None and not self._is_dispatched:
            self._places = options.places()
            keep_in_place(model)

    @property
    def chunks(self) -> int:
        """The number of micro-batches of a mini-batch."""
        if self.pipe is not None:
            return self.pipe.chunks
        return self._options.chunks or 2 * self._count

    @property
    def _count(self) -> int:
        """The number of devices."""
        return len({*(self.model.hf_device_map.values() if self._is_dispatched else self._places)})

    def made(self, sample: Mapping[str, Any] | None = None) -> MappedGPipe:
        """The wrapper.

        Args:
            sample: keyword arguments of the model, for a micro-batch. Blocks are measured with
                these. Without any they are spread by the bytes of their weights.
        """
        if self.pipe is None:
            checkpoint = self._options.checkpoint or "except_last"
            options: dict[str, Any] = {"chunks": self.chunks, "checkpoint": checkpoint}
            # While one thread waits for its device, another thread issues work for the next device.
            options["threads"] = self._count if self._waits and not self._options.slices else 1
            options["slices"] = self._options.slices or 1
            before = [*self.model.parameters()]
            self.pipe = MappedGPipe(self.model, **self._map(sample), **options)
            keep_in_place(self.model, self.pipe.hf_device_map)
            self._moved(dict(zip(before, self.model.parameters())))
        return self.pipe

    def _map(self, sample: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments of the wrapper that say where its modules are."""
        if self._is_dispatched:
            return {}
        if self._like is not None and (device_map := self._like.map_for(self.model, sample)):
            return {"device_map": device_map}
        if len(self._places) == 1:
            is_meant = accelerators() or isinstance(self._options.devices, Sequence)
            return {"device_map": {"": self._places[0]} if is_meant else on_cpu(self.model)}
        on_host = [x for x in self.model.parameters() if x.device == CPU]
        if sample is None or sum(x.nbytes for x in on_host) > MEASURED:
            return {"device_map": by_weights(self.model, self._places)}
        near = map_leaves(lambda x: x.to(CPU) if on_host and isinstance(x, Tensor) else x, sample)
        return {"device_map": "auto", "sample": near, "devices": self._places}

    def map_for(
        self, model: nn.Module, sample: Mapping[str, Any] | None
    ) -> dict[str, torch.device] | None:
        """The device map of the model for another one, if that has the same modules."""
        if type(base_of(model)) is not type(base_of(self.model)):
            return None
        names = {x: name for name, x in self.model.named_modules()}
        prefix = f"{names[base_of(self.model)]}."
        renamed = {key.removeprefix(prefix): x for key, x in self.made(sample).device_map.items()}
        return renamed if renamed.keys() <= dict(model.named_modules()).keys() else None


def keep_in_place(model: Any, device_map: Mapping[str, torch.device] | None = None) -> None:
    """Have Accelerate leave a model where it is: it moves none with a map of several entries."""
    entries = dict(device_map or {})
    if len(entries) < 2:
        device = next((x.device for x in model.parameters()), CPU)
        entries = {name: device for name, _ in model.named_modules()}
    model.hf_device_map = entries


def by_weights(model: nn.Module, places: Sequence[torch.device]) -> dict[str, Device]:
    """Spread the blocks of a model evenly by the bytes of their weights."""

    def measure(blocks: dict[str, nn.Module]) -> dict[str, float]:
        return {name: float(sum(x.nbytes for x in y.parameters())) for name, y in blocks.items()}

    return proposed(places, Wholes.of(model), measure)


def follow(optimizer: Any, moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Have an optimizer train parameters that have moved since it was made.

    Args:
        optimizer: the optimizer, which may have the state of a checkpoint.
        moved: the parameters by what they were: on some devices PyTorch makes new ones.
    """
    for group in optimizer.param_groups:
        group["params"] = [moved.get(x, x) for x in group["params"]]
    for x in [*optimizer.state]:
        optimizer.state[moved.get(x, x)] = optimizer.state.pop(x)
    # Loading moves the state of the optimizer to the devices of the parameters.
    optimizer.load_state_dict(optimizer.state_dict())
