"""Layers that compute with tensors that are no ordinary ones."""

import torch
import torch.utils._pytree as tree
from torch import nn


def nested(layout):
    def compute(x):
        rows = torch.nested.as_nested_tensor([row.view(2, 2) for row in x], layout=layout)
        return torch.stack([row.flatten() for row in (rows * rows).unbind()])

    return compute


def ragged(x):
    rows = [row[: 1 + k % 3].unsqueeze(-1) for k, row in enumerate(x)]
    rows = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    padded = torch.nested.to_padded_tensor((rows.sin() * rows).exp(), 0.0, (len(x), 3, 1))
    return padded.sum(-1) @ torch.ones(3, 4)


def quantised(x):
    return x * torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8).dequantize().exp()


def conjugated(x):
    z = torch.complex(x, x.sin()).conj()
    y = torch.view_as_real(z.exp().resolve_conj() * z)
    return y[..., 0] * y[..., 1] * z.imag


class Named(torch.Tensor):
    """A subclass that changes nothing."""


def subclass(x):
    y = x.as_subclass(Named)
    return (y.sin() * y.exp()).as_subclass(torch.Tensor)


class Wrapped(torch.Tensor):
    """A tensor around another one."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree.tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return tree.tree_map_only(torch.Tensor, Wrapped, function(*args, **kwargs))


class Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Wrapped(x.detach().clone())

    @staticmethod
    def backward(ctx, grad):
        return grad.inner


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.inner.clone()

    @staticmethod
    def backward(ctx, grad):
        return Wrapped(grad)


def wrapped(x):
    y = Wrap.apply(x)
    return Unwrap.apply(y.sin() * y.exp())


#: What a layer computes, by the kind of tensor.
KINDS = {
    "nested": nested(torch.strided),
    "jagged": nested(torch.jagged),
    "ragged": ragged,
    "coo": lambda x: torch.sparse.mm(x.to_sparse() * x.to_sparse(), torch.ones(4, 4)).sin(),
    "csr": lambda x: (x.to_sparse_csr() @ torch.ones(4, 4)).sin(),
    "mkldnn": lambda x: x.to_mkldnn().relu().to_dense().tanh(),
    "quantised": quantised,
    "conjugated": conjugated,
    "subclass": subclass,
    "wrapped": wrapped,
}


class Compute(nn.Module):
    """A layer that computes with one kind."""

    def __init__(self, kind):
        super().__init__()
        self.linear, self.compute = nn.Linear(4, 4), KINDS[kind]

    def forward(self, x):
        return self.compute(self.linear(x))
