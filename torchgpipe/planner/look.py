"""A look at one layer at one size of micro-batch: what it keeps, and the times of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from torchgpipe.autograd.outcome import LARGE
from torchgpipe.balance.sandbox import Sandbox
from torchgpipe.devices.measures import Stopwatch
from torchgpipe.partition.placement import tensors
from torchgpipe.planner.backward import Backward, look_back, own_outputs
from torchgpipe.planner.meter import Meter, storages
from torchgpipe.planner.skips import Popped, Stashed, popped_from
from torchgpipe.skip.namespace import Skip
from torchgpipe.values.microbatch import VALUE

__all__ = ["Look", "look", "sample"]


@dataclass(frozen=True)
class Look:
    """The memory of a layer, in bytes: at one size of micro-batch, or as curves by its rows.

    Args:
        inner: memory that it keeps for backward, besides its input, its output and its weights.
        output: memory of its output.
        forward: the most memory during its forward, above that before, with the output.
        again: likewise up to the last tensor that it saves for backward, weights aside.
        backward: the memory of its backward.
        parameters: memory of its parameters and buffers.
        trainable: memory of the parameters that get a gradient.
        small: memory of those whose gradients wait for the end of a backward, to be added.
        largest: memory of the largest parameter that gets a gradient.
        saves_input: whether it keeps its input for backward.
        saves_output: whether it keeps its output.
        depends: whether its output depends on anything that gets a gradient.
        passes: whether its output is its input, in the same memory, as that of a layer that
            computes in place, or returns a view.
        stashed: the skips that it stashes.
        popped: the skips that it pops.
    """

    inner: Any
    output: Any
    forward: Any
    again: Any
    backward: Backward
    parameters: int
    trainable: int
    small: int
    largest: int
    saves_input: bool
    saves_output: bool
    depends: bool = True
    passes: bool = False
    stashed: Mapping[Skip, Stashed] = field(default_factory=dict)
    popped: Mapping[Skip, Popped] = field(default_factory=dict)


def look(sandbox: Sandbox) -> Look:
    """Run a layer forward and backward, and see what it keeps in between."""
    batch = sandbox.input()
    own = storages(x for _, x in tensors(sandbox.layer))
    saved: dict[int, int] = {}
    again = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal again
        if (place := storages([x])).keys() - own.keys():
            saved.update(place)
            again = meter.highest
        # Not the tensor itself: an output of the node would hold the node, and the node the output,
        # and nobody would free either.
        return x.detach()

    incoming = storages(batch.parts[VALUE])
    arriving = popped_from(sandbox)
    with saved_tensors_hooks(pack, lambda x: x), Meter(sandbox.device) as meter:
        output = sandbox.forward(batch)
    forward = meter.highest
    outgoing = storages(output.parts[VALUE])
    stashed: dict[Skip, Stashed] = {}
    elsewhere = incoming.keys() | outgoing.keys()
    for skip in output.skips.keys() - batch.skips.keys():
        tensors_of = output.parts[skip]
        places = storages(tensors_of)
        stashed[skip] = Stashed(
            sum(places.values()),
            sum(x.nbytes for x in tensors_of if x.requires_grad),
            is_input=bool(places) and places.keys() <= incoming.keys(),
            is_output=bool(places) and places.keys() <= outgoing.keys(),
            saved=bool(places.keys() & saved.keys()),
        )
        elsewhere |= places.keys()
    popped: dict[Skip, Popped] = {}
    for skip in arriving:
        places = storages(batch.parts[skip])
        popped[skip] = Popped(
            sum(places.values()),
            sum(x.nbytes for x in batch.parts[skip] if x.requires_grad),
            saved=bool(places.keys() & saved.keys()),
        )
        elsewhere |= places.keys()
    inner = saved.keys() - elsewhere
    depends = bool(own_outputs(sandbox, output))
    del output, batch
    backward = look_back(sandbox) if depends else Backward()
    for skip, size in backward.holds.items():
        popped[skip] = popped[skip]._replace(holds=size)
    sizes = [x.nbytes for x in {*sandbox.layer.parameters()} if x.requires_grad]
    return Look(
        inner=sum(saved[x] for x in inner),
        output=sum(outgoing.values()),
        forward=forward,
        again=again,
        backward=backward,
        parameters=sum(own.values()),
        trainable=sum(sizes),
        small=sum(x for x in sizes if x < LARGE),
        largest=max(sizes, default=0),
        saves_input=bool(saved.keys() & incoming.keys()),
        saves_output=bool(saved.keys() & (outgoing.keys() - incoming.keys())),
        depends=depends,
        passes=bool(outgoing) and outgoing.keys() <= incoming.keys(),
        stashed=stashed,
        popped=popped,
    )


def sample(sandbox: Sandbox) -> tuple[float, float, float, float]:
    """Run a layer, and return milliseconds: forward, backward for its input, backward, again.

    ``again`` is the time up to the last tensor that the forward saves, weights aside: a second run
    under checkpointing ends there.
    """
    watch, until = sandbox.stopwatch, Stopwatch(sandbox.device)
    own = storages(x for _, x in tensors(sandbox.layer))
    last: list[float] = [0.0]

    def pack(x: Tensor) -> Tensor:
        if x.layout == torch.strided and x.untyped_storage().data_ptr() not in own:
            last[0] = until.stop()
        return x.detach()

    batch = sandbox.input()
    with saved_tensors_hooks(pack, lambda x: x):
        until.start()
        output = sandbox.forward(batch)
    del output
    batch = sandbox.input()
    arriving = [VALUE, *popped_from(sandbox)]
    entries = [x for key in arriving for x in batch.parts[key] if x.requires_grad]
    watch.start()
    output = sandbox.forward(batch)
    forward = watch.stop()
    outputs = own_outputs(sandbox, output)
    own_input = backward = 0.0
    if outputs:
        gradients = [torch.ones_like(x) for x in outputs]
        if entries:
            watch.start()
            torch.autograd.grad(outputs, entries, gradients, retain_graph=True, allow_unused=True)
            own_input = watch.stop()
        watch.start()
        torch.autograd.backward(outputs, gradients)
        backward = watch.stop()
    sandbox.layer.zero_grad()
    own_input, again = min(own_input, backward), min(last[0], forward)
    return 1000 * forward, 1000 * own_input, 1000 * backward, 1000 * again
