"""Operators give the CPU's values in any layout, and have the dtypes of accelerators."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.size import SOAK
from tests.virtual.layouts import LAYOUTS, outcome, verify

IMAGE, TEXT = (2, 8, 4, 6), (3, 5, 8)

#: Functions of a tensor that have kernels of their own for contiguous tensors, or for others.
FUNCTIONS = {
    "group_norm": (IMAGE, lambda x: F.group_norm(x, 4)),
    "group_norm with weights": (
        IMAGE,
        lambda x: F.group_norm(x, 2, torch.arange(8.0).to(x), torch.arange(8.0).to(x)),
    ),
    "instance_norm": (IMAGE, F.instance_norm),
    "pixel_shuffle": (IMAGE, lambda x: F.pixel_shuffle(x, 2)),
    "channel_shuffle": (IMAGE, lambda x: F.channel_shuffle(x, 2)),
    "interpolate": (IMAGE, lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    "adaptive_avg_pool2d": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 2)),
    "silu": (IMAGE, F.silu),
    "attention": (IMAGE, lambda x: F.scaled_dot_product_attention(x, x, x)),
    "grid_sample": (
        IMAGE,
        lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    ),
    "unfold": (IMAGE, lambda x: F.unfold(x, 2)),
    "sum": (IMAGE, lambda x: (x.sum((1, 3)), x.amax(1), x.all(1).float(), x.any((0, 2)).float())),
    "linear": (TEXT, lambda x: F.linear(x, x[0])),
    "svd": (TEXT, torch.linalg.svdvals),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_layouts(name, layout, devices):
    shape, function = FUNCTIONS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    # The gradients that come have the layout, too.
    verify(devices[1], lambda x: function(x), [x], LAYOUTS[layout])


HALVES = (torch.half, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

#: Functions, dtypes that accelerators compute and the CPU does not, and what it computes instead.
WIDER = {
    "interpolate": (
        lambda x: F.interpolate(x.view(1, 1, 8, 8), 3, mode="bilinear", antialias=True),
        HALVES,
        torch.float,
    ),
    "multilabel_margin_loss": (
        lambda x: F.multilabel_margin_loss(
            x.view(8, 8), torch.arange(7, -1, -1, device=x.device).expand(8, 8).contiguous()
        ),
        HALVES,
        torch.float,
    ),
    "rrelu": (lambda x: F.rrelu(x * 1, training=True, inplace=True), HALVES, torch.float),
    "polygamma": (lambda x: torch.polygamma(2, x), HALVES, torch.float),
    "round": (lambda x: torch.round(x, decimals=1), HALVES, torch.float),
    "histc": (lambda x: torch.histc(x, 5, 0, 9), INTEGERS, torch.double),
    "abs": (torch.abs, (torch.bool,), torch.uint8),
    "trace": (lambda x: x.view(8, 8).trace(), (torch.bool,), torch.uint8),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes, _) in WIDER.items() for dtype in dtypes]
)
def test_dtypes_of_accelerators(name, dtype, devices):
    function, _, wide = WIDER[name]
    torch.manual_seed(0)
    x = (torch.rand(64) * 9).to(dtype)
    x.requires_grad_(dtype.is_floating_point)
    mine = outcome(devices[1], function, [x])
    reference = outcome(None, function, [x.detach().to(wide).requires_grad_(x.requires_grad)])
    for a, b in zip(mine, reference, strict=True):
        assert a.dtype == (torch.int64 if name == "trace" else dtype)
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-2, atol=1e-2)


def test_an_output_that_is_given_gets_the_result(devices):
    x = torch.arange(2**53 + 1, 2**53 + 9, device=devices[0])
    before = x.tolist()
    out = torch.empty(0, dtype=torch.int64, device=devices[0])
    assert torch.histc(x % 4, bins=4, min=0, max=4, out=out) is out
    assert out.tolist() == [2, 2, 2, 2]
    torch.histc(x, bins=4)
    # What is only read is as it was, although the CPU computes with fewer digits.
    assert x.tolist() == before


@pytest.mark.parametrize("function", [lambda x: torch.softmax(x, 0), torch.bernoulli])
def test_dtypes_that_no_device_has_are_refused(function, devices):
    with pytest.raises(NotImplementedError, match="'Long'"):
        function(torch.arange(9, device=devices[0]))


def test_sparse_tensors_are_refused(devices):
    """Such a tensor would be on the CPU."""
    with pytest.raises(RuntimeError, match=r"to_sparse.* no sparse tensors .*virtual:0"):
        torch.eye(2, device=devices[0]).to_sparse()


#: Operators that differ from the CPU, or whose values nobody can compare: see docs/testing.rst.
OTHERS = ("empty", "as_strided", "sparse", "_scaled_mm", "tensor_split")
PLACES = {"to"}


def database():
    """PyTorch's own operators with samples of their inputs, if it can be imported."""
    if not SOAK:
        return []
    try:
        import expecttest  # noqa: F401
    except ImportError:
        return []
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if not any(x in op.name for x in OTHERS) and op.name not in PLACES and op.dtypes
    ]


def pytest_generate_tests(metafunc):
    if "op" in metafunc.fixturenames:
        metafunc.parametrize("op", database(), ids=lambda op: op.formatted_name)


@pytest.mark.filterwarnings("ignore")
def test_all_operators_of_pytorch_are_those_of_the_cpu(op, devices):
    """With ``TORCHGPIPE_SOAK=1``, and expecttest, which PyTorch's table needs."""
    dtype = torch.float if torch.float in op.dtypes else min(op.dtypes, key=str)
    needs_grad = op.supports_autograd and dtype == torch.float
    for sample in [*op.sample_inputs("cpu", dtype, requires_grad=needs_grad)][:5]:

        def call(input, args, kwargs):
            return op(input, *args, **kwargs)

        for layout in LAYOUTS.values():
            value = sample.input, sample.args, sample.kwargs
            try:
                reference = outcome(None, call, value, layout)
            except Exception:
                continue
            verify(devices[1], call, value, layout, reference)
