"""Streams: no-ops on the CPU."""

import pytest
import torch

from torchgpipe.devices import streams as stream
from torchgpipe.devices.streams import CPUStream

CPU = torch.device("cpu")
NO_ACCELERATOR = not stream.accelerators()


def test_cpu_stream_is_one():
    assert stream.new_stream(CPU) == stream.current_stream(CPU) == CPUStream(CPU)
    assert stream.get_device(CPUStream(CPU)) == CPU


def test_cpu_operations_do_nothing():
    x = torch.zeros(1)
    with stream.use_stream(CPUStream(CPU)), stream.use_device(CPU):
        stream.wait_stream(CPUStream(CPU), CPUStream(CPU))
        stream.record_stream(x, CPUStream(CPU))


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu", 3)])
def test_canonical_cpu(name):
    assert stream.canonical_device(name) == CPU == torch.zeros(1, device="cpu").device


@pytest.mark.skipif(not NO_ACCELERATOR, reason="there is an accelerator")
def test_no_accelerators():
    assert stream.accelerators() == []
    assert stream.device_types()[0] == "cpu"


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_accelerators():
    first = stream.accelerators()[0]
    assert torch.zeros(1, device=first).device == first
    assert stream.canonical_device(first.type) in stream.accelerators()
    assert stream.canonical_device(0) == first
    assert stream.device_types() == ("cpu", first.type)


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_use_stream_nests_and_restores():
    device = stream.accelerators()[0]
    before = stream.current_stream(device)
    one, two = stream.new_stream(device), stream.new_stream(device)
    with stream.use_stream(one):
        with stream.use_stream(two), stream.use_stream(one):
            assert stream.current_stream(device) == one
        assert stream.current_stream(device) == one
    assert stream.current_stream(device) == before


@pytest.mark.skipif(NO_ACCELERATOR, reason="no accelerator")
def test_wait_between_cpu_and_accelerator():
    device = stream.accelerators()[0]
    x = torch.zeros(1, device=device)
    stream.wait_stream(stream.current_stream(device), CPUStream(CPU))
    stream.wait_stream(CPUStream(CPU), stream.current_stream(device))
    stream.record_stream(x, stream.new_stream(device))
    stream.record_stream(torch.zeros(1), stream.new_stream(device))


def test_a_sparse_tensor_is_recorded_by_its_parts():
    recorded = []

    class Part:
        def __init__(self, name):
            self.record_stream = lambda _: recorded.append(name)

    class Sparse:
        device, is_sparse = CPU, True

        def _indices(self):
            return Part("indices")

        def _values(self):
            return Part("values")

    stream.record_stream(Sparse(), torch.Stream(device="cpu"))
    assert recorded == ["indices", "values"]
