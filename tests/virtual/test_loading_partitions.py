"""A model too large for any one place: memory of devices and host while it is loaded."""

import gc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.examples import MISSING
from torchgpipe import GPipe

WIDTH = 64
LAYER = (WIDTH * WIDTH + WIDTH) * 4
# PyTorch warns each time that there is no process group, which these tests do not need.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


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


def whole_files(file):
    yield torch.load(file, map_location="cpu")


def mapped_files(file):
    yield torch.load(file, map_location="cpu", mmap=True)


def safetensors_files(file):
    yield pytest.importorskip("safetensors.torch", exc_type=MISSING).load_file(
        file.with_suffix(".safetensors")
    )


def safetensors_one_by_one(file):
    safe_open = pytest.importorskip("safetensors", exc_type=MISSING).safe_open
    with safe_open(file.with_suffix(".safetensors"), framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  It is no dict.
            yield {name: tensors.get_tensor(name)}


@pytest.mark.parametrize(
    ("states", "most"),
    [
        (whole_files, 5 * LAYER),
        (mapped_files, 5 * LAYER),
        (safetensors_files, 5 * LAYER),
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


def test_what_saving_holds(devices, tmp_path):
    """safetensors copies all tensors to the host at once, torch.save one after another."""
    save_file = pytest.importorskip("safetensors.torch", exc_type=MISSING).save_file
    model = GPipe(layers(), [3, 3, 2], devices=devices[:3])

    def peak(save, module):
        with OnHost() as host:
            save(module.state_dict(), tmp_path / "file")
        return host.peak

    for partition, size in zip(model.partitions, model.balance):
        assert (size - 1) * LAYER < peak(save_file, partition) <= size * LAYER
    assert 7 * LAYER < peak(save_file, model.module) <= 8 * LAYER
    assert peak(torch.save, model.module) == WIDTH * WIDTH * 4


def test_the_host_is_measured(devices, tmp_path):
    """The measure above notices the whole model at once."""
    torch.save(layers().state_dict(), tmp_path / "model.pt")
    model = GPipe(meta(), [4, 4], devices=devices[:2])
    with OnHost() as host:
        model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert host.peak >= 8 * LAYER


@pytest.mark.parametrize("assigned", ["cpu", "its device"])
def test_assigned_tensors(assigned, devices, tmp_path):
    """Assigned tensors replace the parameters, and must be on their devices."""
    plain = layers()
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    model = GPipe(meta(), [4, 4], devices=devices[:2])
    x = torch.rand(2, WIDTH)
    if assigned == "cpu":
        model.load_state_dict(torch.load(tmp_path / "model.pt"), assign=True)
        with pytest.raises(RuntimeError, match=r"partition 0: virtual:0, 0\.weight: cpu"):
            model(x.to(devices[0]))
    else:
        for device, part in zip(devices, [plain[:4], plain[4:]]):
            torch.save(part.state_dict(), tmp_path / "part.pt")
            state = torch.load(tmp_path / "part.pt", map_location=device)
            model.load_state_dict(state, strict=False, assign=True)
        assert torch.equal(model(x.to(devices[0])).cpu(), plain(x))


def trained(devices, balance, seed=0, **options):
    torch.manual_seed(seed)
    model = GPipe(layers(6), balance, devices=devices[: len(balance)], chunks=2)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.rand(8, WIDTH).to(devices[0])).square().mean().backward()
        optimizer.step()
    return model, optimizer


def check(source, target):
    """Compare model and optimizer with those of another balance, and the places of tensors."""
    (model, optimizer), (other, its_optimizer) = source, target
    assert same(model.module, other.module)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            found = its_optimizer.state[q][key]
            assert torch.equal(value.cpu(), found.cpu())
            assert found.device == (torch.device("cpu") if key == "step" else q.device)


@pytest.mark.parametrize("map_location", [None, "cpu"])
@pytest.mark.parametrize("foreach", [False, True])
def test_optimizer_state_follows_its_parameter(map_location, foreach, devices, tmp_path):
    model, optimizer = source = trained(devices, [1, 2, 3], foreach=foreach)
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "training.pt")
    other, its_optimizer = target = trained(devices, [4, 2], seed=1, foreach=foreach)
    loaded = torch.load(tmp_path / "training.pt", map_location=map_location)
    moved = {x.device for x in loaded["model"].values()}
    assert moved == ({torch.device("cpu")} if map_location else set(devices[:3]))
    other.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    check(source, target)
    for training in (source, target):
        torch.manual_seed(2)
        training[1].zero_grad()
        training[0](torch.rand(8, WIDTH).to(devices[0])).square().mean().backward()
        training[1].step()
    check(source, target)


class Copies(TorchDispatchMode):
    """A mode that records the devices of copies to the host that nobody waits for."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"):
            self.found.add(args[0].device)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [{}, {"flatten_optimizer_state_dict": True}, {"cpu_offload": True}],
    ids=lambda options: next(iter(options), "default"),
)
def test_distributed_checkpoint(options, devices, tmp_path):
    options = StateDictOptions(**options)

    def state(model, optimizer):
        weights, its_state = get_state_dict(model.module, optimizer, options=options)
        return {"model": weights, "optimizer": its_state}

    source = trained(devices, [1, 2, 3])
    with Copies() as copies:
        # Otherwise it waits for one device before it writes what comes from all.
        writer = dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0)
        dcp.save(state(*source), storage_writer=writer)
    assert not copies.found

    model, optimizer = trained(devices, [4, 2], seed=1)
    loaded = state(model, optimizer)
    dcp.load(loaded, checkpoint_id=tmp_path)
    weights, its_state = loaded["model"], loaded["optimizer"]
    set_state_dict(
        model.module,
        optimizer,
        model_state_dict=weights,
        optim_state_dict=its_state,
        options=options,
    )
    check(source, (model, optimizer))


def test_distributed_checkpoint_copies_ahead_from_all_devices(devices, tmp_path):
    """PyTorch waits for the current device only, by default. The guide gives the remedy."""
    model, _ = trained(devices, [1, 2, 3])
    with Copies() as copies:
        dcp.save({"model": model.module}, checkpoint_id=tmp_path)
    assert copies.found == set(devices[:3])


def test_full_state_dict_is_pytorchs_error(devices):
    model, optimizer = trained(devices, [4, 2])
    options = StateDictOptions(full_state_dict=True)
    weights, state = get_state_dict(model.module, optimizer, options=options)
    with pytest.raises(ValueError, match="Device mismatch"):
        set_state_dict(
            model.module,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=options,
        )
    with pytest.raises(ValueError, match="Multiple devices found"):
        set_model_state_dict(model.module, weights, options=options)
