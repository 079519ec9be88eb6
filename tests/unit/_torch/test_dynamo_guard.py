"""Threads that come and go may trace and compile layers, with PyTorch for CUDA and no GPU."""

import pytest
import torch

from tests.support import fresh

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built() or torch.cuda.is_available(),
    reason="only PyTorch for CUDA without a GPU has a guard in its place",
)

THREADS = """
import threading
import torch
from torch import nn

def each(function):
    for k in range(3):
        thread = threading.Thread(target=function, args=(k,))
        thread.start()
        thread.join()
    print("done")
"""


def test_traces_in_threads_that_end():
    program = """
from tests.support.graphs import Stage

def trace(k):
    (output,), _ = Stage(nn.Linear(2, 2), torch.ones(k + 1, 2)).forward()
    output.sum()

each(trace)
"""
    assert fresh.run(THREADS + program)[:2] == (0, "done\n")


def test_compilations_in_threads_that_end():
    program = """
from torchgpipe import GPipe

class Twice(nn.Module):
    def forward(self, x):
        return 2 * x

def step(k):
    layer = Twice()
    layer.compile(backend="aot_eager", dynamic=False)
    model = GPipe(nn.Sequential(layer), [1], devices=["cpu"], chunks=2)
    model(torch.ones(4, k + 1, requires_grad=True)).sum().backward()

each(step)
"""
    assert fresh.run(THREADS + program)[:2] == (0, "done\n")
