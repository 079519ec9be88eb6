"""Memory that is freed while in use, and taken by the next tensor."""

import pytest
import torch

from tests.support.helpers import assert_no_races
from tests.virtual.programs import new_streams, one, place, read
from torchgpipe.devices.streams import record_stream
from torchgpipe.testing import Stream, observe


def test_memory_allocated_on_another_stream(devices):
    # Earlier work on that stream may use the same memory.
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        with s:
            one(devices[0])
            read(torch.ones(4, device=devices[0]))
            x = torch.empty(4, device=devices[0])
        with t:
            x.fill_(1)
    (race,) = seen.races
    assert (race.kind, race.first.op, race.first.stream) == ("write after write", "empty", place(s))


def use_and_free(device, s, record=False):
    x = torch.ones(4, device=device)
    s.wait_stream(torch.accelerator.current_stream(device))
    with s:
        read(x, "use")
    if record:
        x.record_stream(s)


def test_memory_freed_in_use(devices):
    s = torch.Stream(device=devices[2])
    with observe() as seen:
        use_and_free(devices[2], s)
        use_and_free_again = seen.races
        x = torch.neg(torch.ones(100, device="cpu")).to(devices[2])
        read(x)
    (race,) = use_and_free_again
    assert (race.kind, race.device, race.bytes) == ("memory freed in use", 2, 16)
    assert (race.first.op, race.first.stream) == ("use", place(s))
    assert (race.second.op, race.second.stream) == ("free", Stream(2, 0))
    # Once the memory is allocated again, the report names the operator that took it.
    (race,) = seen.races
    assert (race.kind, race.bytes) == ("reuse of freed memory", 16)
    assert (race.first.op, race.first.stream) == ("use", place(s))
    assert (race.second.op, race.second.stream) == ("empty", Stream(2, 0))


def test_memory_reused_by_the_output_of_an_operator(devices):
    x, s = one(devices[0]), torch.Stream(device=devices[0])
    with observe() as seen:
        use_and_free(devices[0], s)
        torch.cumsum(x, 0)
    assert [race.second.op for race in seen.races if race.kind == "reuse of freed memory"]


@pytest.mark.parametrize("kind", ["conjugated", "negative", "within vmap"])
def test_memory_of_a_tensor_that_pytorch_does_not_record(kind, devices):
    s = torch.Stream(device=devices[0])
    with observe() as seen:
        z = torch.ones(4, dtype=torch.complex64, device=devices[0])
        s.wait_stream(torch.accelerator.current_stream(devices[0]))
        with s:
            read(z)
        if kind == "within vmap":
            torch.vmap(lambda x: record_stream(x.conj(), s) or x)(z)
        else:
            record_stream(z.conj() if kind == "conjugated" else z.conj().imag, s)
        del z
        torch.ones(4, dtype=torch.complex64, device=devices[0])
    assert_no_races(seen)


def test_memory_freed_after_record_stream(devices):
    s = torch.Stream(device=devices[0])
    with observe() as seen:
        use_and_free(devices[0], s, record=True)
        torch.ones(4, device=devices[0])
    assert_no_races(seen)


@pytest.mark.parametrize("waits", [True, False])
def test_what_an_announced_stream_has_waited_for(devices, waits):
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        x = torch.ones(4, device=devices[0])
        for stream in (s, t):
            stream.wait_stream(torch.accelerator.current_stream(devices[0]))
            with stream:
                read(x, str(stream))
        if waits:
            t.wait_stream(s)
        # Its memory is free when the stream has done all that it was given so far.
        x.record_stream(t)
        del x
        torch.ones(4, device=devices[0])
    kinds = [(race.kind, race.first.stream) for race in seen.races]
    assert kinds == [] if waits else [("reuse of freed memory", place(s))]


def test_memory_goes_back_to_the_stream_it_came_from(devices):
    s, t = new_streams(devices[0], 2)
    with observe() as seen:
        use_and_free(devices[0], s)
        with t:
            torch.ones(4, device=devices[0])
    assert [race.kind for race in seen.races] == ["memory freed in use"]


def test_raise_on_reuse(devices):
    s = torch.Stream(device=devices[0])
    before = torch.accelerator.memory_allocated(devices[0])
    with observe(raise_on_race=True) as seen:
        use_and_free(devices[0], s)
        with pytest.raises(RuntimeError, match="race: reuse of freed memory: empty on"):
            torch.ones(4, device=devices[0])
        torch.ones(4, device=devices[0])
    assert len(seen.races) == 1
    assert torch.accelerator.memory_allocated(devices[0]) == before
