"""The pipeline: the order of its cells, in forward and in backward, and their results."""

import itertools
import threading
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.helpers import CPUS, Apply, Log, nodes, plain, reaches, run_pipeline
from tests.support.skips import Pop, Stash
from torchgpipe.devices.pool import StreamPool
from torchgpipe.engine.pipeline import clock_cycles
from torchgpipe.partition.keeping import CHECKPOINT_MODES, checkpointed

CPU = torch.device("cpu")


@given(st.integers(1, 12), st.integers(1, 12))
def test_clock_cycles(m, n):
    cycles = list(clock_cycles(m, n))
    when = {cell: k for k, cycle in enumerate(cycles) for cell in cycle}
    assert sum(map(len, cycles)) == len(when) == m * n
    assert set(when) == {(i, j) for i in range(m) for j in range(n)}
    assert all(when[i, j] == i + j for i, j in when)


devices = st.sampled_from([[CPU] * 3, CPUS[:3], [CPUS[0], CPUS[0], CPUS[1]], CPUS[:2] + CPUS[:1]])


@given(devices, st.integers(1, 5), st.sampled_from(CHECKPOINT_MODES), st.booleans())
def test_backward_takes_the_micro_batches_in_reverse(devices, m, mode, requires_grad):
    log = []
    partitions = [nn.Sequential(nn.Linear(1, 1), Log(j, log)) for j in range(3)]
    for (linear, _), k in zip(partitions, range(3)):
        nn.init.constant_(linear.weight, 1)
        nn.init.constant_(linear.bias, k)
    x = torch.arange(0.0, 10 * m, 10)[:, None].requires_grad_(requires_grad)
    output = run_pipeline(partitions, devices, x, chunks=m, mode=mode)
    output.sum().backward()
    for j in range(3):
        forward = [int(v // 10) for kind, name, v in log if (kind, name) == ("forward", j)]
        backward = [int(v // 10) for kind, name, v in log if (kind, name) == ("backward", j)]
        assert forward[:m] == list(range(m))
        # Recomputation.
        assert forward[m:] == list(reversed(range(checkpointed(mode, m))))
        assert backward == list(reversed(range(m)))


def graph_of(devices, m, mode, requires_grad, partitions=None):
    """The autograd graph of a step, and the node of the last layer of each cell."""
    partitions = partitions or [nn.Sequential(nn.Linear(1, 1)) for _ in devices]
    layers = {}
    for j, partition in enumerate(partitions):

        def hook(module, inputs, output, j=j):
            layers[len([i for i, k in layers if k == j]), j] = output.grad_fn

        partition.register_forward_hook(hook)
    x = torch.rand(m, 1, requires_grad=requires_grad)
    output = run_pipeline(partitions, devices, x, chunks=m, mode=mode)
    return nodes(output), layers


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_fence(mode, requires_grad):
    """The graph itself orders backward, and does not rely on autograd's own order."""
    graph, layers = graph_of(CPUS[:2], 3, mode, requires_grad)
    for i in (1, 2):
        # [1] The gradient that leaves the layers leads to the micro-batch before.
        assert reaches(graph, layers[i, 1], layers[i - 1, 1])
        assert reaches(graph, layers[i, 0], layers[i - 1, 0]) == requires_grad
        # [1'] Where none leaves the layers, the one that comes to them leads there, too.
        joins = [
            node
            for node in graph
            if node.name() == "JoinBackward"
            and any(found is layers[i, 0] for found, _ in node.next_functions)
        ]
        assert requires_grad or any(reaches(graph, join, layers[i - 1, 0]) for join in joins)


@pytest.mark.parametrize("mode", ["never", "except_last"])
def test_no_device_is_ahead_of_the_clock_cycles_by_more_than_one(mode, monkeypatch):
    monkeypatch.setattr("torchgpipe.engine.workers.has_streams", lambda device: True)
    graph, layers = graph_of(CPUS[:3], 6, mode, requires_grad=True)
    for i in range(6):
        for j in (1, 2):
            for later in range(6):
                leads = reaches(graph, layers[later, j - 1], layers[i, j])
                assert leads == (later >= i + 2), (i, j, later)


def test_nor_by_as_many_micro_batches_as_there_are_copy_streams(monkeypatch):
    """The order of forward may be any."""
    monkeypatch.setattr(StreamPool, "COPIES", 4)
    graph, layers = graph_of(CPUS[:3], 6, "never", requires_grad=True)
    for i, j in itertools.product(range(6), (1, 2)):
        for later in range(i + 3, 6):
            assert reaches(graph, layers[later, j - 1], layers[i, j]), (i, j, later)


def test_nor_is_one_that_pops_from_far_away(monkeypatch):
    monkeypatch.setattr(StreamPool, "COPIES", 5)
    partitions = [nn.Sequential(x) for x in (Stash(), nn.Tanh(), nn.Tanh(), Pop())]
    graph, layers = graph_of(CPUS, 9, "never", True, partitions)
    for i in range(9):
        for later in range(9):
            leads = reaches(graph, layers[later, 0], layers[i, 3])
            assert leads == (later >= i + 4), (i, later)


@pytest.mark.parametrize("view", [False, True])
def test_parameter_that_is_passed_on_is_not_changed(view):
    """Another device gets a copy; on the same device PyTorch forbids the change."""
    weight = nn.Parameter(torch.ones(2, 3))
    calls = []

    def change(x):
        calls.append(1)
        # The fence of the first micro-batch is another one.
        return x * 2 if len(calls) % 2 else x.mul_(2)

    layers = [lambda x: weight[:] if view else weight, change, lambda x: x * 1]
    partitions = [nn.Sequential(Apply(layer)) for layer in layers]
    for devices in ([CPUS[0], CPUS[0], CPUS[1]], CPUS[:3]):
        with suppress(RuntimeError):
            run_pipeline(partitions, devices, torch.ones(2, 3), chunks=2)
        assert torch.equal(weight, torch.ones(2, 3))


class Scale(nn.Module):
    """A layer that saves a frozen parameter for backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=False)

    def forward(self, x):
        return x * self.scale


class Calls(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        self.calls.append(x)
        return x


def with_frozen_layers():
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), Scale())
    return [nn.Sequential(nn.Linear(2, 2), nn.Tanh()), frozen, nn.Sequential(nn.Tanh())]


def test_frozen_partition_is_not_recomputed():
    """Backward needs only the partition's weights, which exist anyway."""
    calls = []
    partitions = with_frozen_layers()
    partitions[1].append(Calls(calls))
    x = torch.rand(3, 2)
    output = run_pipeline(partitions, CPUS[:3], x, chunks=3, mode="always")
    recomputed = [node for node in nodes(output) if node.name() == "RecomputeBackward"]
    # A recomputation waits for nobody if the output of the cell stays on its device.
    assert len(recomputed) == 3
    leaves = list(partitions[0].parameters())
    expected = torch.autograd.grad(plain(nn.Sequential(*partitions), x, 3).sum(), leaves)
    calls.clear()
    assert all(map(torch.allclose, torch.autograd.grad(output.sum(), leaves), expected))
    assert calls == []


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("name", ["0.weight", "1.scale"])
def test_frozen_tensor_changed_before_backward_is_an_error(name, mode):
    """The change is an error as in plain PyTorch."""
    partitions = with_frozen_layers()
    output = run_pipeline(partitions, CPUS[:3], torch.rand(3, 2), chunks=3, mode=mode)
    partitions[1].state_dict()[name].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("devices", [[CPU] * 2, CPUS[:2]], ids=["one device", "two devices"])
def test_exception_of_the_earliest_micro_batch(devices):
    """Both cells of a cycle fail, and the plain module would have reached micro-batch 0 first."""
    barrier = threading.Barrier(len(set(devices)), timeout=10)

    class Fail(nn.Module):
        def __init__(self, name, at):
            super().__init__()
            self.name, self.at, self.calls = name, at, 0

        def forward(self, x):
            self.calls += 1
            if self.calls > self.at:
                barrier.wait()
                raise KeyError(self.name)
            return x

    partitions = [nn.Sequential(Fail("second", at=1)), nn.Sequential(Fail("first", at=0))]
    expected = "first" if len(set(devices)) == 2 else "second"
    with pytest.raises(KeyError, match=expected):
        run_pipeline(partitions, devices, torch.rand(3, 1), chunks=3)
    # The cells of the next cycle did not start.
    assert [partition[0].calls for partition in partitions] == [2, 1 if expected == "first" else 0]
