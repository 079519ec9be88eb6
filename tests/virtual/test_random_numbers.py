"""Random numbers do not depend on the devices: each has a generator of its own.

The reference is a wrapper with a single partition, without checkpointing; with one chunk, the plain
model.
"""

import threading
import time
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from tests.support.helpers import MODES, assert_no_races, wrap
from tests.support.size import some
from tests.virtual.models import LAYERS, WIDTH, Apply
from torchgpipe import GPipe, ScheduledLoss
from torchgpipe.ambient.generators import get_state, set_state
from torchgpipe.testing import observe

CPU = torch.device("cpu")

#: Devices of partitions, by their indices.
PLACES = [[3, 1], [3, 2, 1, 0], [0, 1, 0, 1], [1, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7]]

#: Layers that draw.
DRAWING = {
    "dropout": LAYERS["dropout"],
    "rand_like": lambda: Apply(lambda x: x + torch.rand_like(x)),
    "bernoulli": lambda: Apply(lambda x: x * torch.bernoulli(torch.full_like(x, 0.5))),
    "normal_": lambda: Apply(lambda x: x * torch.empty_like(x).normal_()),
    "randperm": lambda: Apply(lambda x: x[:, torch.randperm(WIDTH, device=x.device)]),
    "stochastic depth": lambda: Apply(
        lambda x: x.tanh() if torch.rand((), device=x.device).item() < 0.5 else x
    ),
}


def made(*names):
    """Eight layers, of which every other one draws."""
    torch.manual_seed(0)
    names = [*names, *["dropout"] * (4 - len(names))]
    return nn.Sequential(*[x for name in names for x in (LAYERS["linear"](), DRAWING[name]())])


ALL = [[*DRAWING][:4], [*DRAWING][2:]]


def seed(devices, home):
    """Seed all generators otherwise than that of the first device, where the numbers come from."""
    for k, device in enumerate(devices):
        generator = torch.Generator(device).manual_seed(1 if device == home else k + 2)
        set_state(device, generator.get_state())


def step(model, home, devices):
    """The output, the gradients, and the generator of the first partition after a step."""
    seed(devices, home)
    before = {device: get_state(device) for device in [CPU, *devices]}
    x = torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    x = x.to(home).requires_grad_()
    output = model(x)
    states = {device: get_state(device) for device in before}
    gradients = torch.autograd.grad(output.square().sum(), [x, *model.parameters()])
    for device, state in before.items():
        assert torch.equal(state, states[device]) == (device != home)
        assert torch.equal(states[device], get_state(device))
    return [x.detach().cpu() for x in [output, *gradients]] + [states[home]]


def same(found, expected):
    assert len(found) == len(expected)
    return all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("place", "chunks"),
    [*product(PLACES, [3]), *product(some(PLACES, PLACES[::4]), [1])],
    ids=str,
)
def test_same_on_any_devices(devices, place, chunks):
    for names in ALL:
        if chunks == 1:
            expected = step(made(*names).to(devices[0]), devices[0], devices)
        else:
            expected = step(wrap(made(*names), devices[:1], "never", chunks), devices[0], devices)
        for k, mode in enumerate(MODES):
            model = wrap(made(*names), [devices[d] for d in place], mode, chunks)
            with observe(jitter=k) as seen:
                found = step(model, devices[place[0]], devices)
            assert same(found, expected), mode
            assert_no_races(seen)


@pytest.mark.parametrize("call", [0, 2])
@pytest.mark.parametrize("place", [[0, 1], [0, 0], [0, "cpu", 1]], ids=str)
def test_layer_that_fails_leaves_all_generators_as_found(devices, place, call):
    calls = []

    def failing(x):
        calls.append(x)
        if len(calls) > call:
            raise ArithmeticError
        return x

    module = made()
    module[-1] = Apply(failing)
    model = wrap(module, [d if d == "cpu" else devices[d] for d in place])
    seed(devices, devices[0])
    before = {device: get_state(device) for device in [CPU, *devices]}
    with pytest.raises(ArithmeticError):
        model(torch.rand(3, WIDTH, generator=torch.Generator()).to(devices[0]))
    for device, state in before.items():
        assert torch.equal(state, get_state(device))


class Moving(nn.Module):
    """A model that runs a wrapper's partitions by hand."""

    def __init__(self, model):
        super().__init__()
        self.partitions, self.devices = model.partitions, model.devices

    def forward(self, x):
        for partition, device in zip(self.partitions, self.devices):
            x = partition(x.to(device))
        return x


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("place", [["cpu", 0], [1, "cpu", 0, "cpu"], ["cpu", 2, 1, "cpu"]], ids=str)
def test_each_type_of_device_has_numbers_of_its_own(devices, place, chunks):
    """Numbers go on from device to device of one type, past devices of the other type."""
    places = [CPU if d == "cpu" else devices[d] for d in place]
    one = [CPU if d == "cpu" else devices[5] for d in place]
    homes = [CPU, next(d for d in places if d != CPU)]

    def run(model, homes):
        seed(devices, homes[1])
        torch.default_generator.manual_seed(1)
        before = {device: get_state(device) for device in devices}
        x = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(3)).double()
        output = model(x.to(model.devices[0]))
        states = {device: get_state(device) for device in [CPU, *devices]}
        for device, state in before.items():
            assert torch.equal(state, states[device]) == (device != homes[1])
        gradients = torch.autograd.grad(output.square().sum(), [*model.parameters()])
        assert all(torch.equal(states[device], get_state(device)) for device in states)
        return [x.detach().cpu() for x in [output, *gradients]] + [states[x] for x in homes]

    for names in ALL:
        expected = run(wrap(made(*names), one, "never", chunks), [CPU, devices[5]])
        if chunks == 1:
            plain = Moving(wrap(made(*names), one, "never", 1))
            assert same(run(plain, [CPU, devices[5]]), expected)
        for k, mode in enumerate(MODES):
            with observe(jitter=k) as seen:
                assert same(run(wrap(made(*names), places, mode, chunks), homes), expected), mode
            assert_no_races(seen)


def test_wrappers_in_several_threads(devices):
    """Wrappers use the same devices in opposite order, and all steps end."""
    errors = []
    places = [[d if d == "cpu" else devices[d] for d in x] for x in ([0, 1], [1, 0], [0, "cpu"])]
    # A recomputation is not kept apart from what other threads draw on an accelerator.
    models = [wrap(made(), place, "never") for place in [*places, places[-1][::-1]]]

    def train(model):
        x = torch.ones(6, WIDTH, device=model.devices[0], dtype=torch.double)
        try:
            for _ in range(5):
                model(x).sum().backward()
        except BaseException as error:
            errors.append(error)

    run_in_threads([partial(train, model) for model in models])
    assert errors == []


def run_in_threads(functions):
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def squares(x, y):
    return (x - y).square().mean()


class Drawing(nn.Module):
    """A layer that may draw, and takes its time."""

    def __init__(self, draws):
        super().__init__()
        self.linear, self.draws = nn.Linear(WIDTH, WIDTH), draws

    def forward(self, x):
        y = self.linear(x).sin()
        time.sleep(0.001)
        return (y * torch.rand(x.shape, device=x.device)).sin() if self.draws else y


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1", "fill_drain"])
@pytest.mark.parametrize("draws", [[True, False], [False, True], [True, True]])
@pytest.mark.parametrize("is_first", [True, False])
def test_stages_on_an_accelerator_and_the_cpu(devices, is_first, draws, schedule):
    places = [devices[0], CPU][:: 1 if is_first else -1]
    found = {}
    for mode in ("never", "always"):
        torch.manual_seed(0)
        layers = nn.Sequential(*map(Drawing, draws))
        model = GPipe(layers, [1, 1], devices=places, chunks=3, checkpoint=mode)
        training = ScheduledLoss(model, squares, schedule)
        for step in range(3):
            torch.manual_seed(step)
            x = torch.rand(6, WIDTH).to(places[0])
            try:
                loss = training(x, x.to(places[1]))
            except RuntimeError as error:
                # A false alarm.
                pytest.fail(str(error))
            loss.backward()
            grads = [p.grad.cpu() for p in training.parameters()]
            found.setdefault(mode, []).append([loss.detach().cpu(), *grads, torch.get_rng_state()])
    for one, other in zip(*found.values()):
        assert all(map(torch.equal, one, other))
