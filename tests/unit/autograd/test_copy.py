"""The autograd functions Copy and Wait."""

import pytest
import torch

from torchgpipe.autograd import copy
from torchgpipe.autograd.copy import leave, wait
from torchgpipe.devices import streams as stream
from torchgpipe.devices.streams import CPUStream, current_stream, new_stream

CPU = CPUStream(torch.device("cpu"))


@pytest.fixture
def streams(device):
    """Two streams of one device: one to leave from, and one to arrive on."""
    return new_stream(device), new_stream(device)


@pytest.fixture(params=[leave, copy.copy, wait], ids=lambda function: function.__name__)
def function(request):
    return request.param


def test_values_and_gradients(function, streams, device):
    x = torch.arange(3.0, device=device, requires_grad=True)
    (y,) = function(*streams, x)
    (y * 2).sum().backward()
    assert y.tolist() == [0, 1, 2]
    assert x.grad.tolist() == [2, 2, 2]


def test_copy_between_devices(device):
    x = torch.arange(3.0, requires_grad=True)
    (y,) = copy.copy(CPU, current_stream(device), x)
    (z,) = copy.copy(current_stream(device), CPU, y * 2)
    z.sum().backward()
    assert (y.device, z.device) == (device, torch.device("cpu"))
    assert z.tolist() == [0, 2, 4]
    assert x.grad.tolist() == [2, 2, 2]


def test_keeps_what_requires_grad(function, streams, device):
    inputs = (
        torch.ones(2, dtype=torch.bool, device=device),
        torch.ones(2, device=device),
        torch.ones(2, device=device, requires_grad=True),
    )
    outputs = function(*streams, *inputs)
    assert [t.requires_grad for t in outputs] == [False, False, True]
    assert [t.dtype for t in outputs] == [t.dtype for t in inputs]


def test_no_gradient_for_one_of_two(function, streams, device):
    x = torch.ones(1, device=device, requires_grad=True)
    _, b = function(*streams, x * 2, x * 3)
    b.backward()
    assert x.grad.item() == 3


def test_double_backward(function, streams, device):
    x = torch.tensor([2.0], device=device, requires_grad=True)
    (y,) = function(*streams, x**3)
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(grad, x)
    assert second.item() == 12.0


def test_output_may_be_changed_in_place(function, streams, device):
    x = torch.ones(2, device=device, requires_grad=True)
    (y,) = function(*streams, x * 2)
    y.mul_(3)
    y.sum().backward()
    assert x.grad.tolist() == [6, 6]


def test_without_grad(function, streams, device):
    with torch.no_grad():
        (y,) = function(*streams, torch.ones(1, device=device, requires_grad=True) * 1)
    assert not y.requires_grad
    (y,) = function(*streams, torch.ones(1, device=device))
    assert not y.requires_grad


@pytest.fixture
def calls(monkeypatch):
    """A log of calls of the streams ``'compute'``, which is the current one, and ``'copy'``."""
    log = []
    monkeypatch.setattr(copy, "wait_stream", lambda a, b: log.append(("wait", a, b)))
    monkeypatch.setattr(copy, "record_stream", lambda x, s: log.append(("record", x.item(), s)))
    monkeypatch.setattr(copy, "get_device", lambda stream: torch.device("cpu"))
    return log


@pytest.mark.parametrize(
    ("source", "target", "non_blocking"),
    [
        ("meta", "xpu", True),
        ("meta", "cpu", False),
        ("cpu", "meta", False),
        ("cpu:0", "cpu:1", False),
    ],
)
def test_copies_from_and_to_the_cpu_block(source, target, non_blocking):
    """The host reads and writes tensors on the CPU without waiting for streams."""

    class Fake:
        def to(self, device, **arguments):
            return device, arguments

    source, target = torch.device(source), torch.device(target)
    streams = CPUStream(source), CPUStream(target)
    moved = copy.moved([Fake(), None], *streams, other=streams[0])
    assert moved == ((target, {"non_blocking": non_blocking}), None)


def test_a_copy_on_one_device_hands_over(calls):
    x = torch.ones(1, requires_grad=True)
    (y,) = copy.copy("lane 1", "lane 2", x * 1)
    assert calls == [("wait", "lane 2", "lane 1"), ("record", 1, "lane 2")]
    calls.clear()
    (y * 3).backward()
    assert calls == [], "the autograd engine does"


def test_wait_hands_over_in_forward_and_the_engine_in_backward(calls):
    x = torch.ones(1, requires_grad=True)
    y, z = wait("copy", "compute", x * 1, x * 2)
    assert calls == [
        ("wait", "compute", "copy"),
        ("record", 1, "compute"),
        ("record", 2, "compute"),
    ]
    calls.clear()
    (y * 3 + z * 4).backward()
    assert calls == []


def test_a_missing_gradient_stays_missing(calls):
    x = torch.ones(1, requires_grad=True)
    y, _ = wait("copy", "compute", x * 1, x * 2)
    y.backward()
    assert x.grad.item() == 1


@pytest.mark.parametrize("departs", [False, True])
def test_what_leaves_the_compute_stream_is_a_clone(calls, departs):
    """Layers may change the tensor while it is copied, and record_stream does not prevent that."""
    streams = ("compute", "copy") if departs else ("copy", "compute")
    x = torch.ones(1, requires_grad=True) * 1
    left = []
    x.register_hook(left.append)
    (y,) = (leave if departs else wait)(*streams, x)
    grad = torch.ones(1)
    y.backward(grad)
    assert (y.data_ptr() == x.data_ptr()) == (not departs)
    assert (left[0].data_ptr() == grad.data_ptr()) == departs


def test_a_device_without_streams_clones_nothing():
    x = torch.ones(1, requires_grad=True) * 1
    for function in (leave, wait):
        (y,) = function(CPU, CPU, x)
        assert y.data_ptr() == x.data_ptr()


def test_copy_runs_on_the_streams_of_both_devices(monkeypatch):
    used = []

    class Used(stream.use_stream):
        def __enter__(self):
            used.append(self.stream)

    a, b = CPUStream(torch.device("cpu", 1)), CPUStream(torch.device("cpu", 2))
    monkeypatch.setattr(copy, "use_stream", Used)
    (y,) = copy.copy(a, b, torch.ones(1, requires_grad=True))
    y.backward()
    # The other one is current where it is applied, and so it is in backward.
    assert used == [a, a]
