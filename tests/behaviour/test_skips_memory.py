"""Memory of skips: how many are alive at once, and until when."""

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.helpers import CPUS, MODES, run_pipeline
from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable, stash


class Watch:
    """Weak references to stashed storages, and the most that were alive when a layer looked."""

    def __init__(self):
        self.refs, self.peak = [], 0

    def alive(self):
        return len({ref.cdata for ref in self.refs if not ref.expired()})

    def layers(self):
        watch = self

        @skippable(stash=["x"])
        class Put(nn.Module):
            def forward(self, input):
                tensor = input * 3
                watch.refs.append(StorageWeakRef(tensor.untyped_storage()))
                yield stash("x", tensor)
                del tensor
                watch.peak = max(watch.peak, watch.alive())
                return input * 2

        @skippable(pop=["x"])
        class Get(nn.Module):
            def forward(self, input):
                x = yield pop("x")
                # Another one, if it came from another device.
                watch.refs.append(StorageWeakRef(x.untyped_storage()))
                # A checkpointed cell that saves nothing would not be computed again.
                return input * torch.ones(1) + x

        return Put(), Get()


@pytest.mark.parametrize("distance", [0, 2, 4])
@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("mode", ["no grad", *MODES])
def test_how_many_are_alive(mode, chunks, distance):
    """One skip at most is alive for each micro-batch between the stash and the pop.

    With m micro-batches and d partitions from the one to the other, micro-batch i is stashed in
    clock cycle i and popped in clock cycle i + d, after micro-batch i + d was stashed: these are
    min(m, d + 1), and it is one where both are in one partition. Nobody saves a skip that is only
    added. A checkpointed cell keeps what it pops until it has been computed again: all m, if it
    comes from another partition.
    """
    watch = Watch()
    put, get = watch.layers()
    layers = [put, *[nn.Identity() for _ in range(4)]]
    layers.insert(distance or 1, get)
    balance = [1] * 6 if distance else [2, 1, 1, 1, 1]
    model = GPipe(
        nn.Sequential(*layers),
        balance,
        devices=["cpu"] * len(balance),
        chunks=chunks,
        checkpoint="never" if mode == "no grad" else mode,
    )
    x = torch.ones(8, 1, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            with torch.set_grad_enabled(mode != "no grad"):
                output = model(x)
            checkpointed = {"always": chunks, "except_last": chunks - 1}.get(mode, 0)
            assert watch.alive() == (checkpointed if distance else 0)
            # Skips that a later cell keeps, and skips on their way.
            assert watch.peak <= max(min(chunks, distance + 1), checkpointed + 1 if distance else 0)
            if mode in ("no grad", "never"):
                assert watch.peak == min(chunks, distance + 1)
            if mode != "no grad":
                output.sum().backward()
            assert watch.alive() == 0
    finally:
        gc.enable()
    if mode != "no grad":
        assert torch.equal(x.grad, torch.full_like(x, 10.0))


@pytest.mark.parametrize("devices", [CPUS[:1] * 2, CPUS[:2]], ids=["one device", "two devices"])
@pytest.mark.parametrize("balance", [[5], [1, 4], [3, 2]])
@pytest.mark.parametrize("grad", [False, True])
def test_alive_until_its_last_use(devices, balance, grad):
    """A skip dies with the last layer that uses it, and not at the end of the partition."""
    watch = Watch()
    put, get = watch.layers()
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(watch.alive())
            return x + 1

    layers = iter([put, Look(), get, Look(), nn.Identity()])
    partitions = [nn.Sequential(*[next(layers) for _ in range(size)]) for size in balance]
    gc.disable()
    try:
        with torch.set_grad_enabled(grad):
            run_pipeline(partitions, devices[: len(balance)], torch.ones(1, 1, requires_grad=True))
    finally:
        gc.enable()
    # After a copy to another device, only the copy is alive.
    assert seen == [0 if balance[0] == 1 and devices[0] != devices[1] else 1, 0]


@skippable(pop=["x"], stash=["nothing"])
class GetAndGoOn(nn.Module):
    """A layer that is done with a skip long before it returns."""

    def __init__(self, alive):
        super().__init__()
        self.alive, self.seen = alive, []

    def forward(self, input):
        x = yield pop("x")
        output = input + x
        del x
        self.seen.append(self.alive())
        yield stash("nothing", None)
        self.seen.append(self.alive())
        return output


@skippable(pop=["nothing"])
class End(nn.Module):
    def forward(self, input):
        yield pop("nothing")
        return input


@pytest.mark.parametrize("wrapped", [False, True])
def test_alive_until_its_layer_yields_again(wrapped):
    """Python holds what it sends to a generator until the generator yields again, or returns."""
    watch = Watch()
    layer = GetAndGoOn(watch.alive)
    model = nn.Sequential(watch.layers()[0], layer, End())
    if wrapped:
        model = GPipe(model, [1, 2], devices=["cpu"] * 2, chunks=1)
    with torch.no_grad():
        model(torch.ones(1, 1))
    assert layer.seen == [1, 0]
