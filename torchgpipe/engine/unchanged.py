"""Trial runs of a model, which leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from torchgpipe.ambient.generators import generator_of, get_state, set_state
from torchgpipe.devices.streams import CPU
from torchgpipe.recompute.once import updated_in, updates

__all__: list[str] = []


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run a model in train mode; leave its buffers, its mode and random numbers as they were."""
    buffers = {x: x.clone() for x in model.buffers()}
    # Copies of the dicts of buffers are kept, too: a forward may replace a buffer by a new tensor.
    tables = [(module._buffers, {**module._buffers}) for module in model.modules()]
    modes = {module: module.training for module in model.modules()}
    generators = {generator_of(x.device) for x in model.parameters()} | {CPU}
    states = {generator: get_state(generator) for generator in generators}
    try:
        model.train()
        with updates(updated_in(model)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        for table, before in tables:
            table.update(before)
        with torch.no_grad():
            for x, values in buffers.items():
                # equal() raises for tensors without values (meta), whose copy below is free.
                with suppress(RuntimeError):
                    if x.equal(values):
                        continue
                x.copy_(values)
        for generator, state in states.items():
            set_state(generator, state)
