"""The value of a tensor that is no argument of the graph must not come into it."""

import copy
import math
import pickle
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.graphs import traced
from torchgpipe.graphs.places import UntraceableError, verify_plain

TWO = torch.tensor(2)
HALF = torch.tensor(0.5)
ROW = torch.tensor([1.0, 2.0, 3.0])
WEIGHT = nn.Parameter(torch.ones(3))
LIST = [1.0, 2.0, 3.0]


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(3, 3), function
        self.register_buffer("mean", torch.ones(3))

    def forward(self, x):
        return self.function(self, self.layer(x))


class Backward(torch.autograd.Function):
    """Read a number in backward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * HALF.item()


def caught(own, x):
    try:
        return x * HALF.item()
    except Exception:
        return x * 2


READ = {
    "item": lambda own, x: x * HALF.item(),
    "float": lambda own, x: x * float(HALF),
    "int": lambda own, x: x * int(TWO),
    "complex": lambda own, x: x * complex(HALF).real,
    "bool": lambda own, x: x if HALF else -x,
    "comparison": lambda own, x: x if HALF > 1 else -x,
    "tolist": lambda own, x: x * ROW.tolist()[0],
    "tolist of one": lambda own, x: x * HALF.tolist(),
    "numpy": lambda own, x: x * float(ROW.numpy()[0]),
    "array": lambda own, x: x * float(numpy.asarray(ROW)[0]),
    "shared with numpy": lambda own, x: x * float(numpy.from_dlpack(ROW)[0]),
    "index of a list": lambda own, x: x * LIST[TWO],
    "index": lambda own, x: x[:, TWO],
    "slice": lambda own, x: x[:TWO],
    "range": lambda own, x: x * len(range(TWO)),
    "size": lambda own, x: x.repeat(1, TWO),
    "sizes": lambda own, x: x.split([TWO, 1], 1)[0],
    "format": lambda own, x: x * float(f"{HALF:.1f}"),
    "text": lambda own, x: x * len(repr(ROW)),
    "print": lambda own, x: x * len(str(HALF)),
    "in": lambda own, x: x if 1.0 in ROW else -x,
    "in a list": lambda own, x: x if HALF in [TWO] else -x,
    "equal": lambda own, x: x if torch.equal(ROW, ROW) else -x,
    "allclose": lambda own, x: x if torch.allclose(ROW, ROW) else -x,
    "nonzero": lambda own, x: x if HALF.is_nonzero() else -x,
    "a sum of both": lambda own, x: x * (HALF * 2),
    "number of an operator": lambda own, x: torch.add(x, x, alpha=HALF),
    "fill": lambda own, x: x + torch.full((3,), HALF),
    "range of tensors": lambda own, x: x * torch.linspace(0, HALF, 3),
    "probability": lambda own, x: F.dropout(x, HALF),
    "tensor": lambda own, x: x * torch.tensor([HALF, HALF, HALF]),
    "tensor of one": lambda own, x: x * torch.tensor(HALF).item(),
    "element": lambda own, x: x * ROW[0].item(),
    "elements": lambda own, x: x * max(float(a) for a in ROW),
    "detached": lambda own, x: x * ROW.detach().tolist()[0],
    "data": lambda own, x: x * ROW.data.tolist()[0],
    "parameter": lambda own, x: x * WEIGHT.tolist()[0],
    "copy": lambda own, x: x * copy.deepcopy(ROW).tolist()[0],
    "pickle": lambda own, x: x * len(pickle.dumps(ROW)),
    "memory": lambda own, x: x * ROW.untyped_storage()[0],
    "mathematics": lambda own, x: x * math.exp(HALF),
    "length": lambda own, x: x * len(ROW),
    "shape": lambda own, x: x * ROW.shape[0],
    "dtype": lambda own, x: x.to(ROW.dtype),
    "kind": lambda own, x: x.to(ROW),
    "backward": lambda own, x: Backward.apply(x),
    "caught": caught,
    "within a transform": lambda own, x: torch.vmap(lambda row: row * HALF.item())(x),
    "gradient": lambda own, x: x if own.layer.weight.grad is None else -x,
}


@pytest.mark.parametrize("name", READ)
def test_values_that_are_read(name):
    with warnings.catch_warnings():
        # Scalars from tensors that require gradients.
        warnings.simplefilter("ignore")
        reason = "reads the gradient" if name == "gradient" else "not among its parameters"
        with pytest.raises(UntraceableError, match=reason):
            traced(Layer(READ[name]), torch.rand(2, 3, requires_grad=True))


UNREAD = {
    "numbers": lambda own, x: x * torch.tensor(0.5) + torch.tensor(LIST),
    "number of numbers": lambda own, x: x * torch.tensor(0.5).item(),
    "array of numbers": lambda own, x: x * torch.from_numpy(numpy.ones(3, "float32")),
    "what an argument is": lambda own, x: x.view(-1, len(own.mean)).to(own.mean).type_as(x),
    "gradient of a value": lambda own, x: x if x.grad_fn is not None else -x,
    "index that is an argument": lambda own, x: x[:, own.mean.long()],
    "made": lambda own, x: x * torch.arange(3) + torch.zeros(3).fill_(0.5),
    "transform": lambda own, x: torch.vmap(lambda row: row * row.sum())(x),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_does_not_read(name):
    layer, x = Layer(UNREAD[name]), torch.rand(2, 3)
    joint = traced(layer, x).joint
    assert joint.calls


def test_tensors_of_other_classes():
    verify_plain([torch.ones(2), nn.Parameter(torch.ones(2)), nn.Buffer(torch.ones(2))])
    with pytest.raises(UntraceableError, match="Sub"):
        verify_plain([torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {}))])
    with pytest.raises(UntraceableError, match="sparse"):
        verify_plain([torch.ones(2).to_sparse()])
