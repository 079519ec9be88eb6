"""A wrapped model computes what its layers compute without it, and nothing races.

Two steps in a row, with an optimizer and clipping between them, under a host that stumbles.
"""

import re
from itertools import product

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.size import some
from tests.virtual.models import (
    LAYERS,
    ROWS,
    WIDTH,
    Apply,
    Shifted,
    skip_layer,
)
from tests.virtual.random_models import Pipeline
from tests.virtual.stages import SEEDS, own_streams
from tests.virtual.training import verify
from torchgpipe.devices.pool import StreamPool
from torchgpipe.testing import observe


def layers(*names):
    return [LAYERS[name]() for name in names]


def several(j, n):
    """Skips from the first partition to all others, and two to the last."""
    every = {
        f"{k}": way for k, way in zip(range(1, n + 1), 2 * ["input", "output", "scalar", "none"])
    }
    if j == 0:
        return [*layers("linear"), skip_layer(stashed=every)]
    names = [f"{j}"] if j < n - 1 else [f"{n - 1}", f"{n}"]
    return [skip_layer(popped=dict.fromkeys(names, "shift")), *layers("linear")]


def long(j, n):
    if j == 0:
        return [*layers("linear"), skip_layer(stashed={"long": "output"})]
    if j == n - 1:
        return [skip_layer(popped={"long": "shift"}), *layers("linear")]
    # Its gradient is the one that the skip's is added to.
    return [Shifted(), *layers("tanh")]


#: The layers of partition j of n.
CASES = {
    "several skips": several,
    "a long skip": long,
    "tuples": lambda j, n: layers(
        *[["linear", "pair", "detached"], ["all shifted", "reversed"], ["sum", "linear"]][j % 3]
    ),
    "dropout": lambda j, n: layers("linear", "dropout", "tanh"),
    "batch norm": lambda j, n: layers("linear", "batch norm"),
    "deferred batch norm": lambda j, n: layers("linear", "batch norm", "tanh"),
    "uneven batches": lambda j, n: layers("linear", "tanh", "layer norm"),
    "shifted": lambda j, n: [Shifted(twice=bool(j % 2)), *layers("linear")],
    "frozen": lambda j, n: layers("frozen", *["shifted"] * (j == n // 2), "tanh"),
}


def wrapped(partitions, devices, mode="never", **options):
    return wrap(partitions, devices, mode, **options).double()


def batch(rows):
    return torch.randn(rows, WIDTH).double()


#: Properties that differ with the number of partitions.
PAST_OTHERS = ["several skips", "a long skip"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "n"), [*product(CASES, [4]), *product(some(CASES, PAST_OTHERS), [8])]
)
def test_parity(devices, name, n, mode):
    chunks = 3
    model = wrapped(
        [CASES[name](j, n) for j in range(n)],
        devices[:n],
        chunks=chunks,
        mode=mode,
        deferred_batch_norm=name.startswith("deferred"),
    )
    rows = ROWS * chunks + (name == "uneven batches")
    for seed in SEEDS[n // 8 :: 2]:
        verify(
            model,
            batch(rows),
            seed=seed,
            streams=(seed + MODES.index(mode)) % 2 == 1,
            requires_grad=(seed // 2 + n // 4 + len(name)) % 2 == 1,
        )


#: Devices of partitions that share some, by their indices.
SHARED = [[0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 0, 1]]


#: Models for partitions that share devices.
ON_SHARED = ["a long skip", "shifted", "batch norm"]


@pytest.mark.parametrize("name", ON_SHARED)
@pytest.mark.parametrize("place", SHARED, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_partitions_that_share_devices(devices, place, mode, name):
    """Autograd adds the last of two gradients in place."""
    n, k = len(place), ON_SHARED.index(name)
    model = wrapped(
        [CASES[name](j, n) for j in range(n)],
        [devices[d] for d in place],
        mode=mode,
        deferred_batch_norm=True,
    )
    verify(model, batch(6), seed=k, streams=k % 2 == 1, requires_grad=k > 1)


#: Ways to take a step that no promise of the contract is about; random models take all.
OWN_WAYS = ["two graphs", "gradients scaled between", "gradients dropped between"]
OWN_WAYS += ["weight decay", "output changed"]


@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1]], ids=str)
@pytest.mark.parametrize("way", OWN_WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_what_else_a_caller_does(devices, place, way, mode):
    model = wrapped(
        [layers("linear", "tanh"), layers("shifted twice", "linear"), layers("linear", "tanh")],
        [devices[d] for d in place],
        mode=mode,
    )
    verify(model, batch(6), way=way, requires_grad=True, around=mode != "never")


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_in_the_memory_of_a_copy_stream(devices, mode):
    """The caller frees such a gradient when the next micro-batch may be about to use its memory."""
    made = [layers("linear"), layers("stopped", "shifted"), layers("tanh"), layers("tanh")]
    model = wrapped(made, [devices[d] for d in (1, 0, 1, 0)], mode=mode)
    verify(model, batch(6), streams=True)


def allocate(device):
    """Allocate some memory on each stream of a device's pool."""
    for _ in range(32):
        with torch.Stream(device):
            torch.empty(1, device=device)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", SHARED, ids=str)
def test_gradients_are_freed_at_the_end_of_a_step(devices, place, mode):
    """The memory of freed gradients may go to any stream of the partitions' pool at once."""
    places = [devices[d] for d in place]
    model = wrapped([layers("linear", "shifted") for _ in place], places, mode=mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = batch(6).to(devices[0])
    with observe(jitter=0) as seen:
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            allocate(devices[0])
    assert_no_races(seen)


@pytest.mark.parametrize("place", SHARED, ids=str)
def test_outputs_are_freed_when_they_are_joined(devices, place):
    model = wrapped([layers("linear") for _ in place], [devices[d] for d in place])
    with observe(jitter=0) as seen, torch.no_grad():
        model(batch(6).to(devices[0]))
        allocate(devices[place[-1]])
    assert_no_races(seen)


@pytest.mark.parametrize("mode", MODES)
def test_weights_without_a_gradient(devices, mode):
    """Backward reads such weights, and autograd does not make the caller's stream wait for that."""
    made = [layers("linear"), layers("frozen"), layers("frozen", "tanh")]
    model = wrapped(made, [devices[d] for d in (0, 1, 1)], mode=mode)
    verify(model, batch(6), way="backward")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [[0, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]], ids=str)
def test_partitions_that_share_layers(devices, place, mode):
    made = [layers("linear", "batch norm", "tanh") for _ in place]
    # The last one on a device has a layer of the first, and a parameter of another of its layers.
    first, last = place.index(place[-1]), len(place) - 1
    made[last][1] = made[first][1]
    made[last][0].layer.weight = made[first][0].layer.weight
    model = wrapped(made, [devices[d] for d in place], mode=mode, deferred_batch_norm=True)
    verify(model, batch(6), seed=1, streams=True)
    verify(model, batch(6), seed=2, requires_grad=True)


@pytest.mark.parametrize(
    "place", [[0, "cpu"], [0, "cpu", 1], ["cpu", 0, 0], [0, 0, "cpu"]], ids=str
)
def test_the_cpu_among_them(devices, place, monkeypatch):
    """Compute streams use tensors from the CPU while copy streams bring the next ones."""
    monkeypatch.setattr(StreamPool, "COPIES", 2)
    for k, mode in enumerate(MODES):
        model = wrapped(
            [layers("linear") for _ in place],
            [d if d == "cpu" else devices[d] for d in place],
            chunks=6,
            mode=mode,
        )
        verify(model, batch(12), seed=k, streams=k == 1, requires_grad=True)


def use(streams):
    for stream in streams:
        torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(0)


def others(devices):
    """New streams that wait for the current ones."""
    streams = [torch.Stream(device) for device in devices]
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
    return streams


@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("when", ["between steps", "before backward", "for the optimizer"])
def test_the_caller_changes_its_streams(devices, place, when):
    for k, mode in enumerate(MODES):
        made = [layers("linear"), layers("stopped", "shifted"), layers("linear", "tanh")]
        model = wrapped(made, [devices[d] for d in place], mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = batch(6).to(devices[0])
        with own_streams(devices), observe(jitter=k) as seen:
            for _ in range(3):
                if when != "before backward":
                    # There, whoever frees a gradient has to record it on the other stream.
                    optimizer.zero_grad()
                output = model(x)
                if when == "before backward":
                    use(others(devices))
                output.square().mean().backward()
                del output
                steps = [torch.accelerator.current_stream(device) for device in devices]
                if when == "for the optimizer":
                    use(others(devices))
                optimizer.step()
                if when == "between steps":
                    use(others(devices))
                if when == "for the optimizer":
                    for stream in steps:
                        stream.wait_stream(torch.accelerator.current_stream(stream.device))
                    use(steps)
            x.mul_(2)
        assert_no_races(seen)


class Buffered(nn.Module):
    """A layer that returns the same memory every time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(ROWS, WIDTH))

    def forward(self, x):
        return self.buffer.copy_(x * 2)


@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1], [0, 0, 0]], ids=str)
def test_a_layer_that_returns_the_same_memory(devices, place):
    made = [layers("linear"), [Buffered()], layers("linear")]
    model = wrapped(made, [devices[d] for d in place])
    for way in ("no_grad", "inference_mode"):
        verify(model, batch(6), way=way, steps=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1], [0, 0, 0]], ids=str)
def test_a_layer_that_fails(devices, place, mode):
    """A layer fails in the midst of a step while others compute, and the next step is right."""
    calls = []

    def failing(x):
        calls.append(x)
        if len(calls) == 2:
            raise ArithmeticError
        return x

    made = [layers("linear", "tanh"), [Apply(failing), *layers("shifted")], layers("linear")]
    model = wrapped(made, [devices[d] for d in place], mode=mode)
    x = batch(6).to(devices[0])
    with observe(jitter=0) as seen:
        with pytest.raises(ArithmeticError):
            model(x)
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        x.mul_(0.5)
        for _ in range(2):
            model(x).sum().backward()
    assert_no_races(seen)
    verify(model, batch(6))


#: Errors for changes in place that are not allowed: some random models make one.
NOT_ALLOWED = "in.?place|refers to a single memory location"


@pytest.mark.parametrize("seed", range(some(30 * len(SEEDS), 10)))
def test_random_models(devices, seed, monkeypatch):
    pipeline = Pipeline(seed)
    monkeypatch.setattr(StreamPool, "COPIES", pipeline.copies)
    try:
        verify(pipeline.model(devices), pipeline.value(), seed=seed, **pipeline.options)
    except RuntimeError as error:
        if not re.search(NOT_ALLOWED, str(error)):
            raise
