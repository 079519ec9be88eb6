"""Functions of tensors give the CPU's numbers on virtual devices, however they are called."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.dry import HARDWARE
from tests.virtual.compare import verify
from torchgpipe.testing import observe

torch.manual_seed(0)  # For the tensors of the table.

CLASSES = torch.tensor([1, 0, 3, 2, 1])
QUERY, KEY = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 8)
X, SQUARE = torch.randn(5, 4), torch.randn(4, 4)


def set_items(x):
    x[x > 0] = 0.0
    x[0] = x[1]
    x[:, 1:3] += 1
    return x


def write_through_views(x):
    x[1].mul_(2)
    x.t()[0].fill_(3)
    x.diagonal().copy_(x[1].clone())
    return x


#: Functions, and their inputs.
FUNCTIONS = {
    "attention": (F.scaled_dot_product_attention, [QUERY, KEY, KEY]),
    "attention, masked": (F.scaled_dot_product_attention, [QUERY, KEY, KEY, torch.eye(5, 6) < 1]),
    "attention, causal": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
        [QUERY, QUERY],
    ),
    "attention, grouped": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        [QUERY, KEY[:, :2]],
    ),
    # What accelerators have a kernel for depends on the layouts, too.
    "attention, heads last": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        [QUERY.movedim(1, -1).contiguous().movedim(-1, 1)] * 2,
    ),
    "attention, strided": (
        lambda q, k: F.scaled_dot_product_attention(q.mT, k.mT, k.mT),
        [QUERY.mT.contiguous(), KEY.mT.contiguous()],
    ),
    "attention, a mask for each head": (
        F.scaled_dot_product_attention,
        [QUERY, KEY, KEY, torch.ones(4, 5, 6).tril() > 0],
    ),
    "attention, one batch of keys": (F.scaled_dot_product_attention, [QUERY, KEY[:1], KEY[:1]]),
    "attention, one head": (F.scaled_dot_product_attention, [QUERY[:, 0], KEY[:, 0], KEY[:, 0]]),
    "attention, no keys": (F.scaled_dot_product_attention, [QUERY, KEY[:, :, :0], KEY[:, :, :0]]),
    "index": (
        lambda x, i: (x[i], x[:, 1], x[1:, ::2], x[..., None], x[i, i]),
        [torch.randn(5, 5), CLASSES],
    ),
    "index by mask": (lambda x: (x[x > 0], x.masked_select(x < 0)), [X]),
    "setitem": (set_items, [X]),
    "index_add": (lambda x, i: x.index_add(0, i, x).index_select(1, i), [X, CLASSES]),
    "scatter": (
        lambda x, i: (
            x.scatter(1, i[:, None], 2 * x[:, :1]),
            x.scatter_add(1, i[:, None], x[:, :1]),
        ),
        [X, CLASSES],
    ),
    "sort": (lambda x: (x.sort(1), x.argsort(0), x.topk(2), x.kthvalue(2), x.median(0)), [X]),
    "cumulate": (lambda x: (x.cumsum(0), x.cumprod(1), x.cummax(0), x.logcumsumexp(1)), [X.exp()]),
    "reduce": (
        lambda x: (
            x.mean(),
            x.std(0),
            x.var(),
            x.amax(1),
            x.max(0),
            x.prod(),
            x.norm(),
            x.logsumexp(1),
        ),
        [X],
    ),
    "linalg": (
        lambda x: (torch.linalg.inv(x), torch.linalg.slogdet(x), torch.linalg.cholesky(x @ x.T)),
        [SQUARE + 4 * torch.eye(4)],
    ),
    "join": (
        lambda x: (
            torch.cat([x, x]),
            torch.stack([x, x], 1),
            x.repeat(2, 1),
            x.tile(2),
            x.roll(1),
            x.flip(0),
        ),
        [X],
    ),
    "views": (
        lambda x: (
            x.t(),
            x.view(-1),
            x[1:].T.reshape(4, -1),
            x.expand(2, 5, 4),
            x.unfold(0, 2, 2),
            x.diagonal(),
        ),
        [X],
    ),
    "as_strided": (lambda x: x.as_strided((3, 2), (4, 2), 1).contiguous(), [X]),
    "in place": (lambda x: x.mul_(2).add_(x.t().clone()).clamp_(-1, 1)[0].exp_(), [SQUARE]),
    "in place on a view": (write_through_views, [SQUARE]),
    "fft": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2j, n=4), [X]),
    "complex": (lambda x: (torch.view_as_complex(x).conj() * 1j).imag, [torch.randn(5, 2)]),
    "conjugate": (lambda x: torch.view_as_real(torch.fft.fft(x).conj().resolve_conj()), [X]),
    "negative": (lambda x: torch.fft.fft(x).conj().imag.clone(), [X]),
    "conjugate in place": (lambda x: torch.fft.fft(x).conj_physical_().abs(), [X]),
    "conjugated by a kernel": (
        lambda x, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b, left=False),
        [SQUARE + 0j, X + 1j],
    ),
    "dtypes": (
        lambda x: (x.double(), x.half(), x.bfloat16(), x.int(), x > 0, x.to(torch.complex64).real),
        [X],
    ),
    "foreach": (lambda x: torch._foreach_add([x, x[0]], [x, x[1]], alpha=2), [SQUARE]),
    "scalars": (
        lambda x: x * x.detach().sum().item() + float(x.detach()[0, 0]) + torch.tensor(2.0),
        [X],
    ),
}


@pytest.mark.parametrize(("function", "inputs"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_function(function, inputs, devices):
    verify(devices[1], function, *inputs)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("attention")])
def test_kernels_of_described_devices(name, devices):
    function, inputs = FUNCTIONS[name]
    with observe(costs=HARDWARE):
        verify(devices[1], function, *inputs)


def test_outputs_that_are_given(devices):
    x, y = torch.randn(5, 4, device=devices[1]), torch.empty(5, 4, device=devices[1])
    assert torch.mul(x, 2, out=y) is y
    assert torch.equal(y, x * 2)
    resized = torch.empty(0, device=devices[1])
    torch.cat([x, y], out=resized)
    assert torch.equal(resized.cpu(), torch.cat([x.cpu(), y.cpu()]))
    values, places = torch.empty(0, device=devices[1]), torch.empty(0, device=devices[1]).long()
    torch.max(x, 1, out=(values, places))
    assert torch.equal(values, x.amax(1))
    assert torch.equal(places, x.argmax(1))
    torch.sum(x, 1, out=(column := torch.zeros(5, 3, device=devices[1]))[:, 1])
    assert torch.equal(column[:, 1], x.sum(1))
    assert not column[:, 0].any()
