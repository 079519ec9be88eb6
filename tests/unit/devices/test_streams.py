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


def test_a_tensor_is_recorded_by_what_has_its_memory(monkeypatch):
    recorded = []

    def record(x, _):
        if x.is_sparse:
            raise NotImplementedError
        assert not x.is_conj()
        assert not x.is_neg()
        recorded.append(x.untyped_storage().data_ptr())

    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    sparse, z = torch.eye(3).to_sparse(), torch.rand(3, dtype=torch.complex64).conj()
    for x in (sparse, z, z.imag, z._neg_view()):
        stream.record_stream(x, torch.Stream(device="cpu"))
    parts = [sparse._indices(), sparse._values(), z, z, z]
    assert recorded == [x.untyped_storage().data_ptr() for x in parts]
