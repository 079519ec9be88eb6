"""Virtual devices answer all that PyTorch asks of a device."""

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchgpipe.testing import load


@pytest.fixture(autouse=True)
def first_device():
    """Tests begin and end on the first device."""
    yield
    torch.accelerator.set_device_index(0)


# ---------------------------------------------------------------- devices


def test_accelerator(devices):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.accelerator.device_count() == torch.virtual.device_count() == len(devices) == 8
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.set_device_index(devices[3])
    assert torch.accelerator.current_device_index() == torch.virtual.current_device() == 3
    with torch.accelerator.device_index(5):
        assert torch.zeros(1, device="virtual").device == devices[5]
    assert torch.zeros(1, device="virtual").device == devices[3]
    with torch.virtual.device(devices[2]):
        assert torch.virtual.current_device() == 2
    assert torch.virtual.current_device() == 3
    torch.accelerator.synchronize()
    torch.virtual.synchronize(devices[1])


def test_devices_are_loaded_once(devices):
    assert load(8) == devices
    for other in (1, 9):
        message = rf"\(devices: {other}, loaded: 8\); load as many as are needed at first"
        with pytest.raises(ValueError, match=message):
            load(other)


def test_current_stream(devices):
    """torch.distributed.checkpoint asks for the current stream in this way."""
    assert torch.virtual.current_stream(3) == torch.accelerator.current_stream(devices[3])
    stream = torch.Stream(devices[0])
    with torch.virtual.stream(stream):
        assert torch.virtual.current_stream() == stream
    assert torch.virtual.current_stream() != stream


def test_each_thread_has_a_current_device(devices):
    torch.accelerator.set_device_index(3)
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.zeros(1, device="virtual").device))
    thread.start()
    thread.join()
    assert found == [devices[0]]


def test_device_that_is_not_there():
    for call in (
        lambda: torch.zeros(1, device="virtual:8"),
        lambda: torch.zeros(1).to("virtual:9"),
        lambda: torch.accelerator.set_device_index(8),
        lambda: torch.accelerator.synchronize(8),
        lambda: torch.Stream("virtual:8"),
        lambda: torch.Generator("virtual:8"),
        lambda: torch.virtual.get_rng_state(8),
        lambda: torch.accelerator.memory_allocated(8),
        lambda: torch.accelerator.reset_peak_memory_stats(8),
    ):
        with pytest.raises(RuntimeError, match=r"no such virtual device .*testing\.load"):
            call()


def test_memory_is_counted(devices):
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(2)
    torch.accelerator.reset_peak_memory_stats(devices[2])
    x = torch.zeros(1000, device=devices[2])
    y = x + 1
    view = y[3:]
    assert torch.accelerator.memory_allocated(devices[2]) == before + 8000
    del x
    assert torch.accelerator.memory_allocated(2) == before + 4000
    assert torch.accelerator.max_memory_allocated(2) == before + 8000
    torch.accelerator.reset_peak_memory_stats(2)
    assert torch.accelerator.max_memory_allocated(2) == before + 4000
    stats = torch.accelerator.memory_stats(2)
    assert stats["allocated_bytes.all.current"] == before + 4000
    del y
    assert torch.accelerator.memory_allocated(2) == before + 4000
    del view
    assert torch.accelerator.memory_allocated(2) == before


# ---------------------------------------------------------------- generators


def test_seeds(devices):
    draws = []
    for _ in range(2):
        torch.manual_seed(11)
        draws.append([torch.randn(3, device=device).tolist() for device in devices])
    assert draws[0] == draws[1]
    torch.virtual.manual_seed_all(12)
    assert torch.virtual.initial_seed() == 12
    assert [torch.randn(3, device=device).tolist() for device in devices] != draws[0]
    torch.virtual.manual_seed(11)
    assert torch.randn(3, device=devices[0]).tolist() == draws[0][0]
    assert torch.virtual.seed() == torch.virtual.initial_seed()


def test_a_draw_is_of_one_device(devices):
    others = [device for device in devices if device.index != 2]
    torch.manual_seed(11)
    states = [torch.get_rng_state(), *[torch.virtual.get_rng_state(device) for device in others]]
    mine = torch.virtual.get_rng_state(2)
    torch.rand(3, device=devices[2])
    torch.nn.functional.dropout(torch.rand(3, device=devices[2]))
    torch.randperm(5, device=devices[2])
    assert not torch.equal(torch.virtual.get_rng_state(2), mine)
    after = [torch.get_rng_state(), *[torch.virtual.get_rng_state(device) for device in others]]
    assert all(torch.equal(a, b) for a, b in zip(states, after))


def test_states_of_generators(devices):
    state, states = torch.virtual.get_rng_state("virtual:3"), torch.virtual.get_rng_state_all()
    drawn = torch.rand(3, device=devices[3])
    torch.virtual.set_rng_state(state, devices[3])
    assert torch.equal(torch.rand(3, device=devices[3]), drawn)
    torch.virtual.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device=devices[3]), drawn)
    torch.virtual.set_rng_state(state, 3)
    with torch.random.fork_rng([3], device_type="virtual"):
        torch.rand(5, device=devices[3])
        torch.manual_seed(1)
    assert torch.equal(torch.rand(3, device=devices[3]), drawn)


def test_generators(devices):
    generator = torch.Generator(devices[1]).manual_seed(4)
    assert generator.device == devices[1]
    assert generator.initial_seed() == 4
    state = generator.get_state()
    drawn = torch.rand(3, device=devices[1], generator=generator)
    assert not torch.equal(torch.rand(3, device=devices[1], generator=generator), drawn)
    generator.set_state(state)
    clone = generator.clone_state()
    for again in (generator, clone):
        assert torch.equal(torch.zeros(3, device=devices[1]).uniform_(generator=again), drawn)
    with pytest.raises(
        RuntimeError, match=r"expected a generator of virtual:2 \(found: virtual:1\)"
    ):
        torch.rand(3, device=devices[2], generator=generator)


# ---------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=str)
def test_autocast(dtype, devices):
    layer, x = nn.Linear(4, 3).to(devices[1]), torch.randn(2, 4, device=devices[1])
    assert not torch.is_autocast_enabled("virtual")
    with torch.autocast("virtual", dtype):
        assert torch.is_autocast_enabled("virtual")
        assert not torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("virtual") == dtype
        output = layer(x)
        assert output.dtype == (x @ x.t()).dtype == dtype
        assert nn.functional.conv1d(x[None], x[:, :2, None]).dtype == dtype
        assert output.softmax(1).dtype == output.exp().dtype == output.sum().dtype == torch.float
        assert torch.cat([output, x[:, :3]]).dtype == torch.float
        with torch.autocast("virtual", enabled=False):
            assert (x @ x.t()).dtype == torch.float
        recomputed = checkpoint(layer, x, use_reentrant=False)
        assert recomputed.dtype == dtype
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            nn.functional.binary_cross_entropy(x, x)
    assert not torch.is_autocast_enabled("virtual")
    assert torch.equal(recomputed, output)
    output.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(3, 4), rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- streams and threads


class Where(torch.autograd.Function):
    """A function that records the thread, the device and the stream of its backward."""

    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        stream = torch.accelerator.current_stream()
        ctx.found.append((threading.get_ident(), torch.virtual.current_device(), stream))
        return grad, None


def test_autograd_has_a_thread_for_each_device(devices):
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x
    for device in devices:
        y = Where.apply(y.to(device), found)
    y.sum().backward()
    assert len({thread for thread, _, _ in found} | {threading.get_ident()}) == 9
    assert [device for _, device, _ in found] == [7, 6, 5, 4, 3, 2, 1, 0]


def test_backward_is_on_the_stream_of_forward(devices):
    found, stream = [], torch.Stream(devices[2])
    x = torch.ones(2, device=devices[2], requires_grad=True)
    with stream:
        y = Where.apply(x, found)
    y.sum().backward()
    assert [stream for _, _, stream in found] == [stream]


def test_streams(devices):
    default = torch.accelerator.current_stream(devices[1])
    a, b = torch.Stream(devices[1]), torch.Stream("virtual:1")
    assert a.device == b.device == devices[1]
    assert len({default, a, b}) == 3
    assert torch.Stream(stream_id=a.stream_id, device_index=1, device_type=a.device_type) == a
    with a:
        assert torch.accelerator.current_stream(devices[1]) == a
        assert torch.virtual.current_device() == 1
        with torch.Stream(devices[2]) as other:
            assert torch.virtual.current_device() == 2
            assert torch.accelerator.current_stream(devices[1]) == a
            assert torch.accelerator.current_stream() == other
        with b:
            assert torch.accelerator.current_stream(devices[1]) == b
        assert torch.accelerator.current_stream(devices[1]) == a
        assert torch.zeros(1, device="virtual").device == devices[1]
    assert torch.virtual.current_device() == 0
    assert torch.accelerator.current_stream(devices[1]) == default
    torch.accelerator.set_stream(b)
    assert torch.accelerator.current_stream() == b
    torch.accelerator.set_stream(default)
    a.wait_stream(b)
    a.synchronize()
    assert a.query()
    torch.zeros(1, device=devices[1]).record_stream(a)


def test_streams_are_of_a_thread(devices):
    found = []
    with torch.Stream(devices[1]) as stream:
        look = threading.Thread(target=lambda: found.append(torch.accelerator.current_stream(1)))
        look.start()
        look.join()
    assert found != [stream]


def test_events(devices):
    stream = torch.Stream(devices[1])
    event = stream.record_event()
    assert event.device == devices[1]
    assert event.query()
    event.synchronize()
    event.wait(torch.Stream(devices[2]))
    torch.accelerator.current_stream(devices[3]).wait_event(event)
    first, second = [torch.Event(devices[1], enable_timing=True) for _ in range(2)]
    first.record(stream)
    second.record(stream)
    assert first.elapsed_time(second) == 0
    never = torch.Event(devices[1])
    assert never.query()
    never.synchronize()
    stream.wait_event(never)
