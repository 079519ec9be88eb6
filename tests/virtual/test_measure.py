"""The speed of hardware as it is measured predicts what the hardware does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchgpipe.testing import dry_run, measure
from torchgpipe.testing.dry_run import watched, without_values
from torchgpipe.testing.hardware import NAMED, Hardware
from torchgpipe.testing.measure import measured


@pytest.fixture(scope="module")
def file(devices, tmp_path_factory):
    """A file of a virtual accelerator's speed, as if it were a GPU."""
    measure.TIMES, measure.ROUNDS = 2, 1  # Virtual time is the same each time.
    described = replace(NAMED["a100-80gb"], launch=4e-6)
    with without_values(described, None), watched(described):
        found = measured(devices[0], "mine", described.memory)
    path = str(tmp_path_factory.mktemp("measured") / "mine.json")
    found.save(path)
    return path


def test_rates_are_those_of_the_data_sheet(file):
    found, described = Hardware.load(file), NAMED["a100-80gb"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert found.rates[dtype] == pytest.approx(described.rates[dtype], rel=1e-3)
    assert found.bandwidth == pytest.approx(described.bandwidth, rel=1e-3)
    assert found.link == pytest.approx(described.link, rel=1e-2)
    assert found.host_link == pytest.approx(described.host_link, rel=1e-2)
    assert found.pageable == pytest.approx(described.pageable, rel=1e-2)
    assert found.launch == pytest.approx(4e-6, rel=1e-3)
    assert found.host > 0 < found.host_backward


def convolutions_and_products(devices):
    layers = nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 512)
    ).to(devices[0])
    input = torch.rand(64, 64, 16, 16, device=devices[0])
    return lambda: layers(input).sum().backward()


def test_a_step_takes_as_long_by_the_file(file, devices):
    found = replace(Hardware.load(file), host=0.0, host_backward=0.0)
    described = replace(NAMED["a100-80gb"], launch=4e-6)
    own, by_file = (dry_run(convolutions_and_products, 1, x).time for x in (described, found))
    assert by_file == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize(("pinned", "rate"), [(True, 50e9), (False, 8e9)])
def test_memory_that_is_not_pinned_takes_longer(devices, pinned, rate):
    def make(devices):
        x = torch.empty(2**20, pin_memory=pinned)
        return lambda: x.to(devices[0])

    hardware = replace(NAMED["h100-80gb"], launch=0.0)
    assert dry_run(make, 1, hardware).time == pytest.approx(2**22 / rate)


def chain(devices):
    x = torch.rand(4, 4, device=devices[0]).requires_grad_()

    def step():
        y = x
        for _ in range(10):
            y = y.tanh()
        torch.autograd.grad(y.sum(), x)

    return step


@pytest.mark.parametrize(
    ("host", "backward", "least"), [(0.0, 0.0, 0.0), (0.02, 0.0, 0.24), (0.02, 0.01, 0.34)]
)
def test_a_step_of_small_operators_takes_the_time_of_the_host(devices, host, backward, least):
    hardware = replace(NAMED["a100-80gb"], launch=1e-6, host=host, host_backward=backward)
    found = dry_run(chain, 1, hardware)
    # Ten forwards, the sum and its gradient are issued by Python, and ten backwards by autograd.
    assert found.time == pytest.approx(least, abs=0.011)
    # The device waits for all but the first operator.
    assert found.late[0] == pytest.approx(max(0, found.time - host), abs=0.011)
    assert ("waits for the host" in str(found)) == bool(host)


def test_shares_between_two_sizes_go_by_their_logarithm(devices):
    def make(devices):
        x = torch.rand(128, 128, device=devices[0])
        return lambda: x @ x

    flops, rates = 2.0 * 128**3, {torch.float32: 1e9}
    shares = {flops / 10: 0.2, 10 * flops: 0.8}
    hardware = Hardware(2**30, rates, 1e15, 1e12, 1e12, 0.0, {"matmul": shares})
    assert dry_run(make, 1, hardware).time == pytest.approx(flops / 0.5e9)
    outside = replace(hardware, efficiency={"matmul": {1.0: 0.1, 10.0: 0.25}})
    assert dry_run(make, 1, outside).time == pytest.approx(flops / 0.25e9)
