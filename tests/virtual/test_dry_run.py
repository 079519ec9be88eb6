"""Dry runs: shapes alone give the memory and the time of the same step with values."""

import gc
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv1d, cross_entropy, scaled_dot_product_attention

from tests.support.dry import HARDWARE, dry, real
from tests.support.helpers import MODES
from torchgpipe import GPipe
from torchgpipe.testing import Hardware, dry_run
from torchgpipe.testing.dry_run import weightless

CLASSES = 10

OPTIMIZERS = {
    "none": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


def images():
    block = [nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Dropout2d(0.1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, CLASSES)]
    stem = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    return nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *block, *head), torch.rand(8, 3, 32, 32)


def words():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    head = [nn.Flatten(), nn.Linear(16 * 6, CLASSES)]
    return nn.Sequential(nn.Embedding(20, 16), layer, *head), torch.randint(20, (8, 6))


MODELS = {"images": (images, [4, 8]), "words": (words, [2, 2])}


def maker(model, optimizer="none", mode=None, autocast=False, chunks=4):
    """A function that makes a step, as a dry run takes it."""
    make, balance = MODELS[model]

    def make_step(devices):
        torch.manual_seed(0)
        layers, input = make()
        if mode is None:
            wrapped, first, last = layers.to(devices[0]), devices[0], devices[0]
        else:
            wrapped = GPipe(layers, balance, devices=devices[:2], chunks=chunks, checkpoint=mode)
            first, last = devices[:2]
        found = OPTIMIZERS[optimizer](wrapped.parameters())
        input, target = input.to(first), torch.randint(CLASSES, (8,)).to(last)

        def step():
            found.zero_grad()
            with torch.autocast("virtual", torch.bfloat16, enabled=autocast):
                cross_entropy(wrapped(input), target).backward()
            found.step()

        return step

    return make_step


@pytest.fixture
def _exact():
    """Have the collector free nothing within a step."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_bytes_and_time_are_those_of_a_real_step(devices, model, optimizer):
    make = maker(model, optimizer)
    assert dry(make, devices[:1]) == real(make, devices[:1])


@pytest.mark.usefixtures("_exact")
def test_autocast(devices):
    make = maker("words", "adam", autocast=True)
    assert dry(make, devices[:1]) == real(make, devices[:1])


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("issuing", ["the calling thread"])
def test_gpipe_takes_the_same_in_each_run(devices, model, mode, issuing):
    """Threads free sooner or later what crosses devices, and a dry run has one thread."""
    make = maker(model, "momentum", mode)
    found = dry(make, devices[:2])
    with torch.autograd.set_multithreading_enabled(False):
        assert found == real(make, devices[:2])


def test_a_large_model_takes_no_memory(devices):
    def make(devices):
        layers = nn.Sequential(*[nn.Linear(2**14, 2**14) for _ in range(4)])
        model = GPipe(layers, [2, 2], devices=devices, chunks=2, checkpoint="always")
        input = torch.rand(2**12, 2**14)
        return lambda: model(input.to(devices[0])).sum().backward()

    found = dry_run(make, 2, HARDWARE)
    weights = 2 * 4 * (2**28 + 2**14)
    assert found.fits
    assert found.remedy == ""
    assert all(2 * weights <= bytes < HARDWARE.memory for bytes in found.allocated)
    assert all(x >= y for x, y in zip(found.reserved, found.allocated))
    # Four products in forward, and eight gradients, less that of the input. A recomputation ends
    # before the last layer of its cell, whose input it has by then.
    flops = 2 * 2**12 * 2**28
    matmuls = [part for part in found.parts if part.kind == "matmul"]
    assert sum(part.flops for part in matmuls) == (4 + 2 + 7) * flops
    least = 13 / 2 * flops / HARDWARE.rates[torch.float32]
    assert least < found.time < 2 * least


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.normal_(),
        lambda x: x.half().clone(),
        lambda x: torch.rand(x.shape),
        lambda x: torch.full(x.shape, 1),
        lambda x: torch.randint(5, x.shape),
    ],
)
def test_large_tensors_of_the_host_are_not_written(devices, write):
    empty = torch.empty(2**16)
    with weightless():
        expected = write(torch.ones(2))
        found = write(empty)
    assert found.dtype == expected.dtype
    assert found.shape == empty.shape
    assert expected.device == found.device
    zeros = torch.zeros(2**18)
    with weightless():
        zeros.normal_()
    assert not zeros.any()


def test_the_report_says_where(devices):
    found = dry_run(maker("images", mode="never"), 2, HARDWARE)
    text = str(found)
    assert text.startswith("predicted for 2 x a100-40gb, not measured (no baseline")
    assert "virtual:1" in text
    assert found.peaks[0].title.startswith(("0F", "0B", "0 to 1"))
    assert {span.layer for span in found.seen.spans} >= {"0", "4"}
    assert all(x <= found.allocated[0] for _, x in found.memory[0])
    assert max(x for _, x in found.memory[0]) == found.allocated[0]
    assert found.timeline.makespan > 0


def too_large(batch):
    def make(devices):
        layers = nn.Sequential(nn.Linear(2**15, 2**15), nn.Linear(2**15, 2**15))
        model = GPipe(layers, [1, 1], devices=devices, chunks=2)
        input = torch.rand(batch, 2**15, device=devices[0])
        return lambda: model(input).sum().backward()

    return make


def test_what_does_not_fit_is_told(devices):
    found = dry_run(too_large(2**18), 2, HARDWARE)
    assert not found.fits
    assert found.too_large.title == "0F0 0 (Linear) addmm"
    assert found.remedy.startswith("what stays between steps takes 40.00 GiB")
    assert "does not fit: 0F0 0 (Linear) addmm on virtual:0" in str(found)
    assert found.allocated[0] > HARDWARE.memory


def test_activations_that_do_not_fit(devices):
    def make(devices):
        layers = nn.Sequential(nn.Linear(2**10, 2**10), *[nn.Tanh() for _ in range(12)])
        model = GPipe(layers, [6, 7], devices=devices, chunks=1, checkpoint="never")
        input = torch.rand(2**21, 2**10, device=devices[0])
        return lambda: model(input).sum().backward()

    found = dry_run(make, 2, HARDWARE)
    assert found.too_large.title == "0F0 4 (Tanh) tanh"
    assert found.remedy.startswith("the step itself takes")


def test_weights_that_do_not_fit(devices):
    small = Hardware(6 * 2**30, HARDWARE.rates, 1e12, 1e11, 1e10)
    found = dry_run(too_large(2), 2, small)
    assert "take more devices" in found.remedy


class Reads(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


class ReadsInBackward(nn.Module):
    def forward(self, x):
        output = x * 2
        output.register_hook(lambda grad: grad * grad.sum().item())
        return output


class Compares(nn.Module):
    def forward(self, x):
        return x * torch.equal(x, x + 1)


class Copies(nn.Module):
    def forward(self, x):
        return x * len(x.tolist())


class Convolves(nn.Module):
    def forward(self, x):
        return conv1d(x.half()[:, None], torch.ones(1, 1, 1, device=x.device).half())


class Sizes(nn.Module):
    def forward(self, x):
        return x[x > 0]


def plain(layer, dtype=torch.float32):
    def make(devices):
        layers = nn.Sequential(nn.Linear(4, 4, dtype=dtype), layer)
        model = GPipe(layers, [1, 1], devices=devices, chunks=1, checkpoint="never")
        return lambda: model(torch.rand(2, 4, dtype=dtype, device=devices[0])).sum().backward()

    return make


@pytest.mark.parametrize(
    ("layer", "dtype", "words"),
    [
        (Reads(), torch.float32, r"no values.*operator: item, layer: 1\).*value_read=0.0"),
        (ReadsInBackward(), torch.float32, r"no values.*operator: item, layer: 1\).*value_read"),
        (Copies(), torch.float32, r"no values.*operator: copy_ to the host, layer: 1\)"),
        (Compares(), torch.float32, r"no values.*operator: equal, layer: 1\).*value_read=0.0"),
        (Convolves(), torch.float32, r"needs a rate.*convolution of Half, layer: 1\).*rates of"),
        (Sizes(), torch.float32, r"no shape that depends.*operator: nonzero, layer: 1\)"),
        (nn.Identity(), torch.float64, r"needs a rate.*addmm of Double, layer: 0\).*rates of the"),
    ],
)
def test_what_cannot_be_run_dry(devices, layer, dtype, words):
    hardware = Hardware(2**30, {torch.float32: 1e12}, 1e12, 1e11, 1e10)
    with pytest.raises(RuntimeError, match=words):
        dry_run(plain(layer, dtype), 2, hardware)
    # The devices are as before.
    assert (torch.ones(2, device=devices[0]) + 1).tolist() == [2, 2]


class Tries(nn.Module):
    def forward(self, x):
        with suppress(RuntimeError):
            x.sum().item()
        raise ValueError("another")


def test_an_error_of_another_kind_is_left_as_it_is(devices):
    with pytest.raises(ValueError, match="another"):
        dry_run(plain(Tries()), 2, HARDWARE)


@pytest.mark.parametrize(
    ("more", "fused"),
    [
        ({"is_causal": True}, True),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool)}, True),
        ({"dropout_p": 0.5}, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_attention_is_one_kernel(devices, dtype, more, fused):
    def make(devices):
        shape = {"device": devices[0], "dtype": dtype, "requires_grad": True}
        query = torch.rand(2, 4, 6, 8, **shape)
        key, value = (torch.rand(2, 2, 6, 8, **shape) for _ in "kv")
        own = {k: x.to(devices[0]) if k == "attn_mask" else x for k, x in more.items()}
        attend = partial(scaled_dot_product_attention, enable_gqa=True, **own)
        return lambda: attend(query, key, value).sum().backward()

    assert dry(make, devices[:1]) == real(make, devices[:1])
    parts = dry_run(make, 1, HARDWARE).parts
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    names = [part.op for part in parts if part.kind == "attention"]
    expected = [kernel, f"{kernel}_backward"] if fused and dtype != torch.float64 else []
    assert names == expected


@pytest.mark.parametrize(
    ("attend", "pairs"),
    [
        (scaled_dot_product_attention, 4 * 6),
        (partial(scaled_dot_product_attention, is_causal=True), 1 + 2 + 3 + 4),
        # Its last query sees all keys.
        (
            partial(torch.ops.aten._scaled_dot_product_flash_attention, is_causal=True),
            3 + 4 + 5 + 6,
        ),
    ],
)
def test_causal_attention_counts_the_pairs_that_it_computes(devices, attend, pairs):
    def make(devices):
        shape = {"device": devices[0], "dtype": torch.bfloat16, "requires_grad": True}
        query, key = torch.rand(2, 4, 4, 8, **shape), torch.rand(2, 4, 6, 8, **shape)

        def step():
            found = attend(query, key, key)
            (found[0] if isinstance(found, tuple) else found).sum().backward()

        return step

    parts = dry_run(make, 1, HARDWARE).parts
    counted = [part.flops for part in parts if part.kind == "attention"]
    assert sorted(counted) == [2 * 2 * 4 * pairs * 8 * products for products in (2, 5)]


@pytest.mark.parametrize(
    ("kernels", "fused"),
    [
        ([SDPBackend.EFFICIENT_ATTENTION], True),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], True),
        ([SDPBackend.MATH], False),
    ],
)
def test_the_caller_says_which_kernel_of_attention_may_be_used(devices, kernels, fused):
    def make(devices):
        query = torch.rand(2, 4, 6, 8, device=devices[0])

        def step():
            with sdpa_kernel(kernels):
                scaled_dot_product_attention(query, query, query)

        return step

    parts = dry_run(make, 1, HARDWARE).parts
    assert fused == any(part.kind == "attention" for part in parts)


@pytest.mark.parametrize(
    ("channels", "settings", "dtype", "share"),
    [
        (2048, {}, torch.float32, 1 / 4),
        (2048, {}, torch.bfloat16, 1),
        (2048, {"stride": 2}, torch.float32, 1),
        (2048, {"groups": 2}, torch.float32, 1),
        (2048, {"dilation": 2}, torch.float32, 1),
        (4, {}, torch.float32, 1),
    ],
)
def test_a_convolution_takes_the_way_that_is_faster(devices, channels, settings, dtype, share):
    """Winograd's way has a quarter of the operations, and moves more bytes."""

    def make(devices):
        layer = nn.Conv2d(channels, channels, 3, padding=1, bias=False, dtype=dtype, **settings)
        input = torch.rand(8, channels, 32, 32, dtype=dtype, device=devices[0])
        layer.to(devices[0])
        return lambda: layer(input)

    rates = {torch.float32: 1e12, torch.bfloat16: 1e12}
    hardware = Hardware(2**40, rates, 2e11, 1e11, 1e10, launch=0, efficiency={"convolution": 0.5})
    (part,) = dry_run(make, 1, hardware).parts
    assert part.kind == "convolution"
    assert part.time == pytest.approx(share * part.flops / 0.5e12, rel=0.15)


def test_the_share_of_the_bandwidth_is_for_all(devices):
    def make(devices):
        layer, input = nn.Linear(4096, 4096, bias=False), torch.rand(1, 4096)
        layer.to(devices[0])
        return lambda: layer(input.to(devices[0])).relu_()

    rest = (1e15, 1e12)
    hardware = Hardware(
        2**30, {torch.float32: 1e20}, 1e12, *rest, 0.0, {"matmul": 0.1, "other": 0.5}
    )
    parts = {part.op: part for part in dry_run(make, 1, hardware).parts}
    assert {"mm", "relu_"} <= parts.keys()
    assert all(x.time == pytest.approx(x.bytes / 0.5e12) for x in parts.values())


@pytest.mark.parametrize("layer", [Reads(), Compares(), Copies()])
def test_a_read_gives_a_number_on_request(devices, layer):
    assert dry_run(plain(layer), 2, HARDWARE, value_read=0.0).fits


def test_operators_without_a_meta_kernel(devices):
    library = torch.library.Library("dry_run_test", "DEF")
    library.define("none(Tensor x) -> Tensor")

    class None_(nn.Module):
        def forward(self, x):
            return torch.ops.dry_run_test.none(x)

    with pytest.raises(
        RuntimeError, match=r"meta kernel of each operator.*none, layer: 1\).*register"
    ):
        dry_run(plain(None_()), 2, HARDWARE)


def test_tensors_of_a_dry_run_have_no_values_after_it(devices):
    kept = []

    def make(devices):
        kept.append(torch.ones(2, device=devices[0]))
        return lambda: None

    dry_run(make, 1, HARDWARE)
    with pytest.raises(RuntimeError, match="a tensor of a dry run has no values"):
        kept[0].tolist()
