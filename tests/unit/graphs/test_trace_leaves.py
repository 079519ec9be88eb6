"""A trace leaves the process as it was, however it ends."""

import functools
import random

import torch
import torch.fx.traceback
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.checkpoints import Operators, old_checkpoint
from tests.support.graphs import traced
from torchgpipe.ambient.context import current_hooks
from torchgpipe.graphs.places import UntraceableError


def process():
    """The settings that a trace might leave in the process, or in this thread."""
    noted = {x: y for x, y in vars(torch.fx.traceback).items() if type(y) in (dict, bool)}
    return {
        "noted": {x: repr(y) for x, y in noted.items() if not x.startswith("__")},
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "hooks": current_hooks(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "threads": torch.autograd.is_multithreading_enabled(),
        "numbers": (random.getstate(), torch.get_rng_state().tolist()),
    }


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


class Failing(torch.autograd.Function):
    """Call a function in forward and in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        call()
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad * 2, None


class Layer(nn.Module):
    """Enter all kinds of blocks, and fail at the k-th place."""

    def __init__(self, k):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.places, self.k = iter(range(100)), k

    def fail(self):
        if next(self.places) == self.k:
            raise ArithmeticError

    def some(self, x):
        return Failing.apply(self.layer(x).sin(), self.fail)

    def forward(self, x):
        addmm = torch.ops.aten.addmm.default
        contexts = functools.partial(create_selective_checkpoint_contexts, [addmm])
        x = checkpoint(self.some, x, use_reentrant=False, context_fn=contexts)
        x = checkpoint(self.some, x, use_reentrant=False)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with Operators(), Functions(), hooks:
            x = self.some(x)
        x = old_checkpoint(self.some, x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.some(x)


#: The places in forward, in backward, and where backward runs the layers again.
PLACES = 10


def test_trace_that_fails_anywhere():
    x = torch.rand(2, 4, requires_grad=True)
    failed = []
    for k in range(PLACES + 1):
        layers, before = Layer(k), process()
        try:
            traced(layers, x)
        except UntraceableError as error:
            failed.append((k, str(error)))
        assert process() == before
    assert failed == [(k, "ArithmeticError: ") for k in range(PLACES)]
