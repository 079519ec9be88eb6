"""Tensors of virtual devices: made, copied and saved like others, and misused."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

FACTORIES = [
    lambda **to: torch.zeros(2, 3, **to),
    lambda **to: torch.ones((2, 3), dtype=torch.bool, **to),
    lambda **to: torch.full((2,), 7, **to),
    lambda **to: torch.arange(5, **to),
    lambda **to: torch.eye(3, **to),
    lambda **to: torch.tensor([[1.0, 2.0]], **to),
    lambda **to: torch.as_tensor([1, 2], **to),
    lambda **to: torch.rand(2, 3, **to),
    lambda **to: torch.randint(9, (4,), **to),
    lambda **to: torch.randperm(6, **to),
    lambda **to: torch.zeros(3, **to).normal_(),
    lambda **to: torch.zeros(2, **to).new_tensor([1, 2]),
    lambda **to: torch.rand_like(torch.zeros(2, **to)),
    lambda **to: torch.meshgrid(torch.arange(3, **to), torch.arange(2, **to), indexing="ij")[0],
]


@pytest.mark.parametrize("factory", FACTORIES)
def test_factories(factory, devices):
    torch.manual_seed(0)
    expected = factory()
    torch.manual_seed(0)
    found = factory(device=devices[2])
    torch.manual_seed(0)
    with torch.device("virtual:2"):
        implied = factory()
    assert found.device == implied.device == devices[2]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found.cpu(), expected)
    torch.testing.assert_close(implied.cpu(), expected)


def test_fresh_memory_is_not_a_number(devices):
    for dtype in (torch.float, torch.double, torch.half, torch.bfloat16):
        assert torch.empty(3, 4, device=devices[1], dtype=dtype).isnan().all()
    assert torch.zeros(3, device=devices[1]).new_empty(5).isnan().all()
    assert torch.empty_like(torch.zeros(3), device=devices[1]).isnan().all()


def test_tensors_show_themselves(devices):
    x = torch.arange(3.0, device=devices[1])
    assert repr(x) == "tensor([0., 1., 2.], device='virtual:1')"
    assert f"{x[1]:.2f}" == "1.00"
    assert x.tolist() == [0, 1, 2]
    assert x.is_virtual
    assert x.virtual(3).device == devices[3]
    with pytest.raises(TypeError, match="can't convert virtual:1 device type tensor to numpy"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [0, 1, 2]


def test_storages(devices):
    x = torch.arange(6.0, device=devices[1])
    view = x.view(2, 3)[1]
    storage = view.untyped_storage()
    assert storage.device == devices[1]
    assert storage.nbytes() == 24
    assert storage.data_ptr() == x.data_ptr() == view.data_ptr() - 12
    storage.resize_(32)
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.empty(0, device=devices[1]).set_(storage)[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.empty(0, device=devices[1]).set_(storage, 1, (2,), (3,)).tolist() == [1, 4]
    storage.resize_(0)
    assert x.untyped_storage().nbytes() == 0
    storage.resize_(24)
    assert x.isnan().all()
    assert x.fill_(2).cpu().untyped_storage().tolist() == storage.cpu().tolist()


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda x: through_file(x),
        lambda x: through_file(x, map_location={"virtual:1": "virtual:1"}),
    ],
    ids=["deepcopy", "file", "file, mapped"],
)
def test_duplicates_stay_on_the_device(duplicate, devices):
    weight = nn.Parameter(torch.randn(4, 3, device=devices[1]).t())
    tied, view = duplicate({"a": weight, "b": weight}), duplicate([weight.data[0], weight.data])
    assert tied["a"] is tied["b"]
    assert isinstance(tied["a"], nn.Parameter)
    assert tied["a"].device == devices[1]
    assert tied["a"].stride() == weight.stride()
    assert torch.equal(tied["a"], weight)
    view[0].fill_(3)
    assert (view[1][0] == 3).all()
    assert not (weight == 3).any()
    layer = nn.BatchNorm1d(3).to(devices[1])
    for mine, other in zip(duplicate(layer.state_dict()).values(), layer.state_dict().values()):
        assert mine.device == devices[1]
        assert torch.equal(mine, other)


def through_file(x, **options):
    """Save an object to a file, and load it."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, **options)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("non_blocking", [False, True], ids=["", "non_blocking"])
def test_copies_between_all_devices(non_blocking, devices):
    x = torch.randn(3, 4)
    for source, target in itertools.product([torch.device("cpu"), *devices], repeat=2):
        found = x.to(source, non_blocking=non_blocking).to(target, non_blocking=non_blocking)
        assert found.device == target
        assert torch.equal(found.cpu(), x)


@pytest.mark.parametrize("pair", [("cpu", 1), (1, "cpu"), (1, 1), (1, 2)], ids=str)
def test_copies_of_all_forms(pair, devices):
    source, target = [place if place == "cpu" else devices[place] for place in pair]
    x = torch.randn(4, 6, device=source)
    for form in (x, x.t(), x[::2, 1::3], x[:, 0], x[0, 0], x[:0], x.expand(2, 4, 6)):
        assert torch.equal(form.to(target).cpu(), form.cpu())
        into = torch.zeros(3, *form.shape, device=target)
        assert torch.equal(into.copy_(form).cpu(), form.cpu().expand_as(into))
        strided = torch.zeros(*form.shape, 2, device=target)[..., 1]
        assert torch.equal(strided.copy_(form, non_blocking=True).cpu(), form.cpu())
    for dtype in (torch.double, torch.half, torch.int, torch.bool, torch.complex64):
        assert torch.equal(x.to(target, dtype).cpu(), x.cpu().to(dtype))
        assert torch.equal(
            torch.zeros(4, 6, dtype=dtype, device=target).copy_(x).cpu(), x.cpu().to(dtype)
        )
    last = torch.randn(2, 3, 4, 5, device=source).to(memory_format=torch.channels_last)
    assert last.to(target).is_contiguous(memory_format=torch.channels_last)
    z = torch.randn(3, dtype=torch.complex64, device=source)
    assert torch.equal(z.conj().to(target).cpu(), z.cpu().conj())
    assert torch.equal(z.conj().imag.to(target).cpu(), -z.cpu().imag)
    zeros = torch._efficientzerotensor(3, device=source)  # That of the CPU has no memory.
    assert torch.equal(torch.ones(3, device=target).copy_(zeros).cpu(), torch.zeros(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.zeros(5, device=target).copy_(x)


def test_pinned_memory():
    x = torch.randn(3)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert torch.equal(pinned, x)
    assert torch.empty(0, pin_memory=True).shape == (0,)
    assert torch.equal(pinned.to("virtual:1", non_blocking=True).cpu(), x)


def test_modules_move(devices):
    layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to("virtual:3")
    assert {x.device for x in layer.state_dict().values()} == {devices[3]}
    assert layer.double()(torch.randn(2, 3, device=devices[3]).double()).dtype == torch.double
    assert {x.device for x in layer.cpu().state_dict().values()} == {torch.device("cpu")}
    with torch.device("virtual:2"):
        assert nn.Linear(2, 2).weight.device == devices[2]
    assert nn.Linear(2, 2, device="meta").to_empty(device="virtual:1").weight.isnan().all()
    loaded = nn.Linear(3, 4, device=devices[1])
    loaded.load_state_dict(nn.Linear(3, 4).state_dict())
    assert loaded.weight.device == devices[1]


# ---------------------------------------------------------------- mistakes


def test_tensors_of_two_devices(devices):
    x, y = torch.ones(3, device=devices[1]), torch.ones(3, device=devices[2])
    pairs = [(x, y), (x, torch.ones(3)), (torch.ones(3), x)]
    calls = [torch.add, torch.mul, torch.dot, torch.Tensor.add_, lambda *both: torch.cat(both)]
    for (a, b), call in itertools.product(pairs, calls):
        with pytest.raises(RuntimeError, match="device"):
            call(a, b)
    with pytest.raises(
        RuntimeError, match=r"on one device \(found: virtual:1, virtual:2\).*\.to\("
    ):
        x @ y
    with pytest.raises(RuntimeError, match=r"device"):
        nn.Linear(3, 3)(x)
    with pytest.raises(RuntimeError, match=r"device"):
        x[torch.tensor([1], device=devices[2])]
    assert x.tolist() == [1, 1, 1]


def test_what_may_be_on_the_cpu(devices):
    x = torch.arange(3.0, device=devices[1])
    assert (x + torch.tensor(2.0)).tolist() == [2, 3, 4]
    assert (torch.tensor(2.0) * x).tolist() == [0, 2, 4]
    assert x[torch.tensor([2, 0])].tolist() == [2, 0]
    x[torch.tensor([True, False, False])] = 5.0
    assert x.tolist() == [5, 1, 2]
    x[1] = torch.tensor(7.0)
    assert x.tolist() == [5, 7, 2]


def test_index_out_of_range(devices):
    table, index = torch.zeros(3, 4, device=devices[1]), torch.tensor([5], device=devices[1])
    for call in (
        lambda: table[index],
        lambda: nn.functional.embedding(index, table),
        lambda: table.index_select(0, index),
        lambda: table.gather(0, index[:, None]),
        lambda: nn.functional.cross_entropy(table[:1], index),
    ):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            call()
