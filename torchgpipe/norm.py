"""Normalisation layers: a recomputation leaves their running statistics alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

__all__: list[str] = []


@contextmanager
def statistics_kept(module: nn.Module) -> Iterator[None]:
    """Keeps the running statistics of torch's own norms as they are within a ``with`` block.

    Meanwhile the layers update others, of undefined value: in training mode, the only one in
    which they update them, neither their output nor their gradient depends on them.
    """
    found: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []
    for layer in module.modules():
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
            buffers = layer._buffers
            found.append((buffers, dict(buffers)))
            for name, buffer in found[-1][1].items():
                if name in ("running_mean", "running_var") and buffer is not None:
                    buffers[name] = torch.empty_like(buffer)
                elif name == "num_batches_tracked" and buffer is not None:
                    # Divided by, so of a defined value.
                    buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for buffers, kept in found:
            buffers.update(kept)
