"""Public projects' models by the device map "auto", on virtual accelerators.

A model runs as it is: wrapped by ``MappedGPipe(model, "auto", sample=...)``, which measures it, in
virtual time too. Its reference is the plain model on the CPU, one micro-batch after another.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.models.projects import PROJECTS
from torchgpipe import Chunk, Chunks, MappedGPipe
from torchgpipe.mapped.device_map import place
from torchgpipe.testing import Hardware, observe

__all__ = ["M", "measure"]

#: The number of micro-batches, and the rows of each.
M, ROWS = 8, 2

#: An accelerator whose arithmetic takes a tiny model some time; copies take none.
HARDWARE = Hardware(
    memory=2**40,
    rates={torch.float32: 1e9},
    bandwidth=1e10,
    link=1e15,
    host_link=1e15,
    launch=1e-6,
)


def measure(
    name: str, devices: Sequence[torch.device], modes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Train a model for a step in each checkpoint mode, by the map that "auto" chooses.

    Args:
        name: the project.
        devices: the accelerators.
        modes: the checkpoint modes.

    Yields:
        For each mode, the greatest difference of a gradient, as :func:`difference` has it; and the
        virtual milliseconds of the step, of the busiest device, and of the plain model on one.
    """
    project = PROJECTS[name]
    torch.manual_seed(0)
    plain = project.make()
    batch = project.batch(M * ROWS)
    parts = [divided(batch, i) for i in range(M)]
    single, *models = [copy.deepcopy(plain) for _ in range(1 + len(modes))]
    for part in parts:
        total(plain(**part)).backward()
    expected = [x.grad for x in (*inputs_of(batch), *plain.parameters())]
    clear(batch)
    most = max(x.abs().max().item() for x in expected if x is not None)
    for model in (single, models[0]):
        # Unlike Module.to(), this keeps weights tied on accelerators of this kind.
        place(model, {"": devices[0]})
    with observe(costs=HARDWARE) as seen:
        for part in parts:
            total(single(**near(part, devices[0]))).backward()
    one = max(seen.busy.values())
    sample = near(project.batch(ROWS), devices[0])
    chosen: dict[str, Any] | None = None
    for model, mode in zip(models, modes):
        options: dict[str, Any] = {"chunks": M, "checkpoint": mode}
        if project.waits:
            options["threads"] = len(devices)
        with observe(costs=HARDWARE):
            if chosen is None:
                pipe = MappedGPipe(model, "auto", sample=sample, devices=devices, **options)
                chosen = pipe.device_map
            else:
                pipe = MappedGPipe(model, chosen, **options)
        given = Chunks.of(parts) if project.ready else batch
        # Before the first step nobody knows whether several threads would do the same.
        for _ in range(2 if project.waits else 1):
            pipe.zero_grad()
            clear(batch)
            with observe(costs=HARDWARE) as seen:
                total(pipe(**near(given, devices[0]))).backward()
        own = [x.grad for x in (*inputs_of(batch), *pipe.parameters())]
        busy: dict[int | str, float] = {}
        for stream, time in seen.busy.items():
            busy[stream.device] = busy.get(stream.device, 0.0) + time
        yield {
            "model": name,
            "n": len(devices),
            "mode": mode,
            "error": max(difference(x, y, most) for x, y in zip(own, expected, strict=True)),
            "races": len(seen.races),
            "ms": seen.makespan,
            "busiest": max(busy.values()),
            "one": one,
            "places": [*Counter(str(x) for x in chosen.values()).values()],
        }


def difference(own: Tensor | None, expected: Tensor | None, most: float) -> float:
    """The error of a gradient, over the greatest number in it; infinite if one is missing.

    Some gradients are nothing but rounding, so what is less than a thousandth of the greatest
    number of all gradients counts as that.
    """
    if own is None or expected is None:
        return 0.0 if own is expected else float("inf")
    scale = max(expected.abs().max().item(), most / 1000)
    return (own.cpu() - expected).abs().max().item() / scale


def divided(batch: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Micro-batch ``i`` of arguments."""

    def part(x: Any) -> Any:
        if isinstance(x, Chunk):
            return x.value.chunk(M, x.dim)[i]
        return x.chunk(M)[i]

    return {key: tree_map(part, x) for key, x in batch.items()}


def near(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments on a device, marked as before."""

    def moved(x: Any) -> Any:
        return x.map(moved) if isinstance(x, Chunk | Chunks) else x.to(device)

    return {key: tree_map(moved, x) for key, x in batch.items()}


def inputs_of(batch: Mapping[str, Any]) -> list[Tensor]:
    """The arguments whose gradients are wanted."""
    found = [x for x in tree_leaves([*batch.values()]) if isinstance(x, Tensor)]
    return [x for x in found if x.requires_grad]


def clear(batch: Mapping[str, Any]) -> None:
    """Forget the gradients of arguments."""
    for x in inputs_of(batch):
        x.grad = None


def total(output: Any) -> Tensor:
    """One number of all that a model returns."""
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    device = leaves[-1].device
    # Losses of micro-batches are one tensor of a pipeline, and as many of the plain model.
    sums = [(x.sum() if x.dim() < 2 else x.square().sum()).to(device) for x in leaves]
    return torch.stack(sums).sum()
