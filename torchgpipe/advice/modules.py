"""The mapped modules of a traced model, in the order of their calls, as if they were layers.

A map that gives each device modules that follow each other is a balance of these modules. So
another balance is another map.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from torchgpipe.mapped.device_map import Mapped

__all__: list[str] = []

#: The most modules that a sentence names.
FEW = 4


class Modules:
    """The modules of a model.

    Args:
        device_map: the map.
        modules: the mapped modules, in the order of their calls.
    """

    def __init__(self, device_map: dict[str, torch.device], modules: Sequence[Mapped]) -> None:
        self._map, self._names = device_map, [x.name for x in modules]
        self._before = [x.device for x in modules]
        groups = [(x, len([*own])) for x, own in groupby(self._before)]
        self.devices = [device for device, _ in groups]
        #: How many modules each device has; none if the model comes back to a device.
        self.balance = tuple([size for _, size in groups])
        if len({*self.devices}) < len(groups):
            self.balance, self.devices = (), []
        homes: dict[torch.Tensor, set[int]] = {}
        for k, mapped in enumerate(modules):
            for x in mapped.module.parameters():
                homes.setdefault(x, set()).add(k)
        #: The numbers of modules that share a parameter, so they have one device.
        self._ties = [numbers for numbers in homes.values() if len(numbers) > 1]

    def allows(self, balance: Sequence[int]) -> bool:
        """Whether modules that share a parameter are on as few devices as before."""
        before, places = self._before, self._places(balance)
        return all(len({places[k] for k in x}) <= len({before[k] for k in x}) for x in self._ties)

    def map(self, balance: Sequence[int]) -> dict[str, torch.device]:
        """The device map of a balance."""
        return {**self._map, **dict(zip(self._names, self._places(balance)))}

    def words(self, balance: Sequence[int]) -> str:
        """Say which modules go elsewhere."""
        moved: dict[torch.device, list[str]] = {}
        for name, old, new in zip(self._names, self._before, self._places(balance)):
            if old != new:
                moved.setdefault(new, []).append(name)
        parts = [
            f"{', '.join(x) if len(x) <= FEW else f'{x[0]} to {x[-1]}'} on {device}"
            for device, x in moved.items()
        ]
        return f"with {', '.join(parts)}, the step"

    def _places(self, balance: Sequence[int]) -> list[torch.device]:
        return [x for x, size in zip(self.devices, balance) for _ in range(size)]
