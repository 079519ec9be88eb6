"""Profiling: the time and the memory that each layer of a sequential module takes.

One layer at a time is copied to the device, put into train mode and run there, so the model may be
larger than the device. The model itself, its modes, its buffers and its gradients stay as they are,
and so do the random numbers that the caller draws next.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import median
from time import monotonic
from typing import Any

import torch
from torch import nn

from torchgpipe.ambient.nesting import holding
from torchgpipe.ambient.notes import noted
from torchgpipe.ambient.random_numbers import FirstNumbers
from torchgpipe.balance.storages import LiveStorages
from torchgpipe.describe.tables import aligned, in_bytes
from torchgpipe.devices.measures import Stopwatch, memory_allocated
from torchgpipe.devices.streams import (
    Device,
    accelerators,
    canonical_device,
    use_device,
)
from torchgpipe.partition.placement import place
from torchgpipe.partition.split import verify_module
from torchgpipe.skip.layout import verify_skippables
from torchgpipe.skip.tracker import SkipTracker, use_skip_tracker
from torchgpipe.values.microbatch import VALUE, Batch, scatter
from torchgpipe.values.structure import arguments

__all__ = ["LayerProfile", "Profile", "detach", "layerwise_sandbox", "profile_layers"]

#: Stands for a sample that is not given, since None is a value.
MISSING: Any = object()


@dataclass(frozen=True)
class LayerProfile:
    """The time and the memory that one layer takes."""

    name: str
    """The name of the layer in the module, and its class."""
    forward: float
    """Seconds, the median of several runs."""
    backward: float
    """Seconds, the median of several runs; 0 if nothing in the layer needs a gradient."""
    parameters: int
    """Bytes of the parameters."""
    activations: int
    """Bytes that the forward leaves behind: tensors kept for backward, and the output."""
    output: int
    """Bytes of the output alone."""


@dataclass(frozen=True)
class Profile:
    """The time and the memory that the layers of a module take on a device, as a table."""

    device: str
    """The device that was measured."""
    layers: tuple[LayerProfile, ...]
    """A row for each layer."""

    def __str__(self) -> str:
        titles = ["layer", "forward ms", "backward ms", "parameters", "activations", "output"]
        rows = [
            [
                layer.name,
                f"{1000 * layer.forward:.3f}",
                f"{1000 * layer.backward:.3f}",
                *map(in_bytes, (layer.parameters, layer.activations, layer.output)),
            ]
            for layer in self.layers
        ]
        return aligned([titles, *rows])

    def to_json(self) -> str:
        """The table as JSON, times in seconds and sizes in bytes."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The table that :meth:`to_json` wrote."""
        found = json.loads(text)
        return cls(found["device"], tuple([LayerProfile(**layer) for layer in found["layers"]]))


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Generate a copy of each layer, on a device and in train mode, to be used one at a time."""
    for layer in module._modules.values():
        assert layer is not None
        # The copy is in no variable here, so that it is freed before the next one is made.
        yield _sandbox(layer, device)


def detach(batch: Batch) -> None:
    """Detach the tensors of a micro-batch from what they were computed from."""
    batch.parts = _leaves(batch).parts


def profile_layers(
    module: nn.Sequential,
    sample: Any = MISSING,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    chunks: int = 1,
    timeout: float = 1.0,
    device: Device | None = None,
    progress: bool = False,
) -> Profile:
    """Measure the time and the memory of each layer, in train mode.

    Args:
        module: the layers.
        sample: an input on any device: the argument of the first layer.

    Keyword Args:
        args: the arguments of the first layer behind the sample, or all of them without a sample.
        kwargs: the keyword arguments of the first layer.
        chunks: the number of micro-batches to make of the sample; by default the sample is one.
        timeout: the seconds to measure. A warm-up comes on top, and each layer is measured
            once at least.
        device: where to measure: by default the first accelerator, or the CPU if there is none.
        progress: whether to show a progress bar.

    Returns:
        A row for each layer. Print it, or keep it with :meth:`Profile.to_json`.

    Raises:
        TypeError: the module could not be wrapped, or there is no input, or args is no tuple.
        ImportError: a progress bar was asked for, and tqdm is not installed.
    """
    verify_module(module)
    verify_skippables(module)
    if not isinstance(args, list | tuple):
        raise TypeError(
            "args must be a tuple of the arguments of the first layer "
            f"(args: {type(args).__name__}); pass one argument as the sample, several as args=(...)"
        )
    args = args if sample is MISSING else (sample, *args)
    if not (args or kwargs):
        raise TypeError(
            "there must be an input of the first layer to measure with (sample: missing, args: (), "
            "kwargs: None); pass a sample, or several arguments as args=(...) and kwargs={...}"
        )
    where = canonical_device(device) if device is not None else default_device()
    end = monotonic() + timeout
    numbers = FirstNumbers(where)

    def rows() -> list[LayerProfile]:
        found = []
        batch = scatter(arguments((*args,), dict(kwargs or {})), chunks)[0]
        batch = _leaves(batch.map(lambda *xs: [x.to(where) for x in xs], [VALUE]))
        layers = module._modules.items()
        for k, (name, layer) in enumerate(_with_bar(layers, len(module)) if progress else layers):
            share = (end - monotonic()) / (len(module) - k)
            title = f"{name} ({type(layer).__name__})"
            with noted(f"raised while layer {title} was profiled"):
                row, batch = _profile_layer(title, layer, batch, where, monotonic() + share)
            found.append(row)
        return found

    def measure() -> Profile:
        with (
            use_device(where),
            numbers.restored(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            return Profile(str(where), tuple(rows()))

    return holding(numbers.locks, measure)


def _profile_layer(
    title: str, layer: Any, batch: Batch, device: torch.device, end: float
) -> tuple[LayerProfile, Batch]:
    # Nothing but this frame holds the copy, which is freed before another one is made.
    sandbox = Sandbox(_sandbox(layer, device), batch, device)
    # The warm-up may allocate memory that stays, such as the workspace of a library.
    sandbox.run()
    activations = sandbox.activations()
    forward, backward = sandbox.times(end)
    row = LayerProfile(
        title,
        forward,
        backward,
        sum(parameter.nbytes for parameter in layer.parameters()),
        activations,
        sum(tensor.nbytes for tensor in sandbox.output.parts[VALUE]),
    )
    return row, sandbox.output


def _sandbox(layer: nn.Module, device: torch.device) -> nn.Module:
    sandbox = deepcopy(layer)
    sandbox.train()
    place([sandbox], [device])
    return sandbox


class Sandbox:
    """A copy of a layer that runs on one input, again and again.

    Args:
        layer: the copy.
        batch: its input, and all skips that were stashed before and not popped.
        device: the device of both.
    """

    def __init__(self, layer: nn.Module, batch: Batch, device: torch.device) -> None:
        self.layer = layer
        self.batch = batch
        self.device = device
        self.stopwatch = Stopwatch(device)
        #: The input of the next layer.
        self.output = batch

    def activations(self) -> int:
        """Run the layer, and return the bytes that its forward leaves behind."""
        batch = self._input()
        before = memory_allocated(self.device)
        if before is not None:
            output = self._forward(batch)
            after = memory_allocated(self.device) or 0
            del output
            # The difference is negative if the garbage collector has freed older tensors.
            return max(0, after - before)
        with LiveStorages() as storages:
            output = self._forward(batch)
        size = sum(storages.sizes())
        del output
        return size

    def times(self, end: float) -> tuple[float, float]:
        """Run the layer until the time is over, at least once, and return the median times."""
        runs = [self.run()]
        while monotonic() < end:
            runs.append(self.run())
        forward, backward = zip(*runs)
        return median(forward), median(backward)

    def run(self) -> tuple[float, float]:
        """Run the layer, and return the times of its forward and of its backward."""
        batch = self._input()
        self.stopwatch.start()
        output = self._forward(batch)
        forward, backward = self.stopwatch.stop(), 0.0
        # Skips that pass by the layer have no backward here.
        parts = [output.parts[key] for key in output.parts if key not in self.batch.skips]
        outputs = [x for x in chain(*parts) if x.requires_grad]
        if outputs:
            gradients = [torch.ones_like(x) for x in outputs]
            self.stopwatch.start()
            torch.autograd.backward(outputs, gradients)
            backward = self.stopwatch.stop()
        self.layer.zero_grad()
        self.output = _leaves(output)
        return forward, backward

    def _input(self) -> Batch:
        # A layer may change its input in place, which autograd forbids for leaves, not clones.
        return self.batch.replace([x.clone() for x in _leaves(self.batch)])

    def _forward(self, batch: Batch) -> Batch:
        tracker = SkipTracker.of(batch)
        with use_skip_tracker(tracker):
            return batch.call(self.layer).with_skips(tracker.parts())


def default_device() -> torch.device:
    """The device to measure on by default: the first accelerator, or the CPU."""
    return [*accelerators(), torch.device("cpu")][0]


def _leaves(batch: Batch) -> Batch:
    """The same values without what they were computed from."""
    return batch.replace([x.detach().requires_grad_(x.requires_grad) for x in batch])


def _with_bar(layers: Iterable[Any], total: int) -> Iterable[Any]:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "a progress bar needs tqdm (progress: True); run `pip install tqdm`"
        ) from error
    shown: Iterable[Any] = tqdm(layers, desc="profile", total=total, unit="layer")
    return shown
