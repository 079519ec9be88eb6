"""Models under a device map in virtual time: equal stages, and a Llama of Transformers.

The Llama and the ways to compute it are those of ``examples/device_map.py``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.simulate.critical import MODES, step_path
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.testing import Busy, observe

__all__ = ["M", "equal_stages", "llama_steps"]

#: The number of micro-batches.
M = 8


def equal_stages(devices: Sequence[torch.device], repeat: int) -> Iterator[dict[str, Any]]:
    """Time stages of F = R = 1 and B = 2 in each mode, beside the critical path.

    Args:
        devices: one for each stage.
        repeat: number of steps of each way.
    """
    n = len(devices)
    input = torch.rand(M, 1, device=devices[0])
    for mode in MODES:
        mapped, wrapped = (nn.Sequential(*[stage() for _ in devices]) for _ in range(2))
        places = {str(k): device for k, device in enumerate(devices)}
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "MappedGPipe": MappedGPipe(mapped, places, chunks=M, checkpoint=mode),
            "GPipe": GPipe(wrapped, [1] * n, devices=devices, chunks=M, checkpoint=mode),
        }
        ms = {name: [makespan(way, input) for _ in range(repeat)] for name, way in ways.items()}
        limit = step_path(mode, M, [1] * n, [1] * n, [2] * n)
        yield {"model": "equal stages", "mode": mode, "ms": ms, "limit": limit}


def stage() -> nn.Module:
    """Make a stage, which saves a tensor that a checkpoint has to compute again."""
    # All of a backward is for the weight: the input of the first stage needs no gradient.
    return nn.Sequential(nn.Tanh(), Busy(1, 0, 2))


def makespan(model: Callable[[Tensor], Tensor], input: Tensor) -> float:
    """Virtual milliseconds of a step."""
    with observe() as seen:
        model(input).sum().backward()
    return seen.makespan


def llama_steps(devices: Sequence[torch.device], repeat: int) -> Iterator[dict[str, Any]]:
    """Time the Llama in each mode, and the ways that have no modes once.

    Args:
        devices: four, which share the blocks.
        repeat: number of steps of each way.

    Raises:
        ImportError: Accelerate or Transformers is not installed.
    """
    example = import_module("examples.device_map")
    model, batch = example.subject()
    for mode in MODES:
        options = Namespace(chunks=M, checkpoint=mode)
        ms: dict[str, list[float]] = {}
        for name, (wrapped, step) in example.steps(model, batch, [*devices], options).items():
            if name.startswith("device map") and mode != "never":
                continue
            ms[name.removesuffix(", by hand")] = times = []
            for _ in range(repeat):
                wrapped.zero_grad()
                times.append(example.timed(name, step, M)[0])
        yield {"model": "Llama", "mode": mode, "ms": ms, "limit": None}
