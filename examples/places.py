"""The devices of the partitions in the examples."""

from __future__ import annotations

import torch


def places(partitions: int) -> list[torch.device]:
    """A device for each partition: accelerators, which neighbours may share, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")] * partitions
    count = torch.accelerator.device_count()
    return [torch.device(accelerator.type, j * count // partitions) for j in range(partitions)]
