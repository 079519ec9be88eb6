"""Cells of a device map whose saved tensors are in the memory of the host."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from tests.support.helpers import assert_no_races
from tests.support.offload import Attention
from tests.support.size import some
from torchgpipe import MappedGPipe, Offload
from torchgpipe.partition.keeping import offload_of
from torchgpipe.testing import observe

M = 6


class Returning(nn.Module):
    """A model that comes back to its first device."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(4)])

    def forward(self, x):
        for k in (0, 1, 2, 3):
            x = self.blocks[k](x)
        return x


def mapped(devices, mode, places, threads=1):
    torch.manual_seed(0)
    where = {f"blocks.{k}": devices[place] for k, place in enumerate(places)}
    return MappedGPipe(Returning(), where, chunks=M, checkpoint=mode, threads=threads)


def trained(model, devices, *, jitter=None):
    """The gradients of the second of two steps, and what was observed in it."""
    for k in range(2):
        model.zero_grad()
        torch.manual_seed(k)
        x = torch.rand(2 * M, 16, 32, device=devices[0])
        for device in devices[:2]:
            torch.accelerator.reset_peak_memory_stats(device)
        with observe(jitter=jitter, costs={"addmm": 1.0, "mm": 1.0, "bmm": 1.0}) as seen:
            model(x).pow(2).mean().backward()
    assert_no_races(seen)
    return [x.grad.cpu() for x in model.parameters()], seen


POLICY = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
LISTS = [
    ["never", "offload", Offload(share=0.5), POLICY],
    ["offload", "always", Offload(share=0.5), "offload"],
    [POLICY, "except_last", "offload", "never"],
    ["always", "never", "always", Offload()],
]


PLACES = [(0, 0, 1, 1), (0, 1, 1, 0)]


@pytest.mark.parametrize(
    ("places", "modes"),
    some([*product(PLACES, LISTS)], [(PLACES[0], LISTS[0]), (PLACES[1], LISTS[2])]),
    ids=lambda x: str(LISTS.index(x) if x in LISTS else x),
)
def test_a_mode_for_each_entry(devices, places, modes):
    expected, _ = trained(mapped(devices, "never", places), devices)
    model = mapped(devices, modes, places)
    found, seen = trained(model, devices, jitter=0)
    assert all(map(torch.equal, found, expected))
    leaving = {places[k] for k, mode in enumerate(modes) if offload_of(mode) and mode != POLICY}
    assert {link[0] for link in seen.transfers if link[1] == "cpu"} == leaving


def test_an_entry_that_is_computed_again(devices):
    """Modules of one entry run twice, and the others do not."""
    calls = []
    model = mapped(devices, ["always", "never", Offload(), "except_last"], (0, 0, 1, 1))
    for block in model.module.blocks:
        block.register_forward_hook(lambda block, *_: calls.append(block))
    trained(model, devices)
    counts = [calls.count(block) for block in model.module.blocks]
    assert counts == [4 * M, 2 * M, 2 * M, 4 * M - 2]


MODES = ["offload", Offload(share=0.4)]


@pytest.mark.parametrize(
    ("places", "mode", "threads"),
    some([*product(PLACES, MODES, [1, 2])], [*zip(PLACES, MODES, [2, 1])]),
    ids=str,
)
def test_gradients_are_the_same_bit_by_bit(devices, places, mode, threads):
    expected, never = trained(mapped(devices, "never", places), devices)
    highest = torch.accelerator.max_memory_allocated(devices[1])
    model = mapped(devices, mode, places, threads)
    found, seen = trained(model, devices)
    assert seen.makespan == never.makespan
    assert torch.accelerator.max_memory_allocated(devices[1]) < highest * 0.9
    assert all(map(torch.equal, found, expected))
    found, _ = trained(model, devices, jitter=0)
    assert all(map(torch.equal, found, expected))
