"""A model too large for any one place: memory of devices and host while it is loaded."""

import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.examples import MISSING
from torchgpipe import GPipe

WIDTH = 64
LAYER = (WIDTH * WIDTH + WIDTH) * 4


def layers(count=8):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])


def meta():
    with torch.device("meta"):
        return layers()


class OnHost(TorchDispatchMode):
    """A mode that records at each operator the bytes of new tensors alive on the host."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        with self:
            # PyTorch imports what modes need when one is used first.
            torch.zeros(1).fill_(1.0)
        self.peak = 0
        gc.collect()
        # The garbage collector neither collects nor lists frozen objects.
        gc.freeze()

    def held(self, arguments):
        gc.collect()
        alive = [*gc.get_objects(), *tree_leaves(arguments)]
        tensors = [x for x in alive if issubclass(type(x), torch.Tensor)]
        # By address: tensors may share a storage.
        held = {x.data_ptr(): x.nbytes for x in tensors if x.device.type == "cpu"}
        return sum(held.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.peak = max(self.peak, self.held((args, kwargs)))
        return function(*args, **(kwargs or {}))


def peaks(devices, before):
    return [
        torch.accelerator.max_memory_allocated(device) - start
        for device, start in zip(devices, before)
    ]


def allocated(devices):
    gc.collect()
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    return [torch.accelerator.memory_allocated(device) for device in devices]


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(
        torch.equal(x.cpu(), other[k].cpu()) for k, x in one.items()
    )


def mapped_files(file):
    yield torch.load(file, map_location="cpu", mmap=True)


def safetensors_one_by_one(file):
    safe_open = pytest.importorskip("safetensors", exc_type=MISSING).safe_open
    with safe_open(file.with_suffix(".safetensors"), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  It is no dict.
            yield {name: tensors.get_tensor(name)}


@pytest.mark.parametrize(
    ("states", "most"),
    [
        (mapped_files, 5 * LAYER),
        (safetensors_one_by_one, WIDTH * WIDTH * 4),
    ],
)
def test_nobody_holds_the_whole_model(states, most, devices, tmp_path):
    """Files end within partitions: each has up to five of eight layers."""
    plain = layers()
    files = [tmp_path / "0.pt", tmp_path / "1.pt"]
    for file, part in zip(files, [plain[:5], plain[5:]]):
        torch.save(part.state_dict(), file)
        if "safetensors" in states.__name__:
            save_file = pytest.importorskip("safetensors.torch", exc_type=MISSING).save_file
            save_file(part.state_dict(), file.with_suffix(".safetensors"))

    devices, balance = devices[:3], [3, 3, 2]
    before = allocated(devices)
    with OnHost() as host:
        model = GPipe(meta(), balance, devices=devices)
    assert host.peak <= 64, "nothing but the value that fills"
    assert peaks(devices, before) == [size * LAYER for size in balance]

    missing = set(model.state_dict())
    with OnHost() as host:
        for file in files:
            for state in states(file):
                keys = model.load_state_dict(state, strict=False)
                missing &= set(keys.missing_keys)
                assert not keys.unexpected_keys
                # The name would hold it while the next one comes.
                del state
    assert not missing
    assert most <= host.peak <= most + 64
    assert peaks(devices, before) == [size * LAYER for size in balance]
    assert same(model.module, plain)


def test_the_example_holds_one_file_at_a_time(devices, tmp_path):
    pytest.importorskip("safetensors", exc_type=MISSING)
    from examples import larger_than_a_device as example

    plain = example.decoder(6, WIDTH)
    names = {str(k): f"layers.{k}" for k in range(len(plain))}
    parts = [plain[k : k + 2] for k in range(0, len(plain), 2)]
    largest = example.save_shards(parts, tmp_path, names)
    with torch.device("meta"):
        module = example.decoder(6, WIDTH)
    model = GPipe(module, [3, 3, 3], devices=devices[:3])
    with OnHost() as host:
        example.load_shards(model, tmp_path, {name: own for own, name in names.items()})
    assert largest <= host.peak <= largest + 64
    assert same(model.module, plain)
