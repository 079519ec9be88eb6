"""Figures of a step, and of one with other partitions and micro-batches."""

from dataclasses import replace

import pytest

from torchgpipe.planner.figures import figures_of
from torchgpipe.planner.observed import HostWait, TracedLayer
from torchgpipe.show.span import Stream, computation, copy


def spans(host=0.0):
    """Two partitions of two layers, and two micro-batches."""
    found = []
    at = 0.0
    for i in range(2):
        for j, (kind, time) in enumerate((("F", 2.0), ("F", 4.0))):
            found.append(computation(Stream(j, 0), at, at + time, (j, kind, i)))
            at += time
        found.append(copy(Stream(1, 1), at, at + 0.5, 0, 1, i))
        for j, time in ((1, 8.0), (0, 2.0)):
            found.append(computation(Stream(j, 0), at, at + time, (j, "B", i)))
            at += time
    return found


LAYERS = [TracedLayer(1.0, 8), TracedLayer(3.0, 16), TracedLayer(1.0, 4), TracedLayer(1.0, 4)]


def figures(layers=LAYERS):
    return figures_of(spans(), [2, 2], False, layers, 3, 0.0)


def test_as_it_was():
    found = figures([])
    assert (found.chunks, found.rows) == (2, 6)
    costs = found.costs([2, 2], 2)
    assert costs.F == [2, 4]
    # The first partition has no gradient of its input.
    assert (costs.I, costs.W) == ([0, 4], [2, 4])
    # Nothing was computed again, which would take as long as the forward.
    assert costs.R == costs.F
    assert costs.copy == {(0, 1): 0.5}
    assert found.host == {}


def test_other_micro_batches():
    costs = figures().costs([2, 2], 4)
    assert costs.F == [1, 2]
    assert costs.copy == {(0, 1): 0.25}


def test_other_partitions():
    costs = figures().costs([1, 3], 2)
    # A quarter of the first partition is left, and the rest is where the second one is.
    assert pytest.approx([0.5, 1.5 + 4]) == costs.F
    assert sum(costs.W) == pytest.approx(6)
    assert costs.copy == {(0, 1): 0.25}


def late(issued, **more):
    """The figures of a step that the host holds up, whose computations were issued in time."""
    step = [x for x in spans() if x.kind != "copy"]
    step = [replace(x, issued=issued(k, x)) for k, x in enumerate(step)]
    return figures_of(step, [2, 2], True, [], 3, 0.5, **more)


def test_hosts_that_are_late():
    """A computation that takes about as long as to issue it is taken to run meanwhile."""
    found = late(lambda _, x: x.start)
    assert found.host["F", 0] == 2.0
    assert found.times["F", 0] == 2.0 / 2
    # What takes much longer, or much less, has nothing to do with the host.
    assert found.times["F", 1] == 4.0
    found = late(lambda k, _: k / 10)
    assert found.times["F", 0] == 2.0


def test_hosts_that_wait():
    """The wait is not the time that it takes to issue, and only one wait is known."""
    found = late(lambda _, x: x.start, waits={1: HostWait(4.0, 0.0)})
    assert found.host["F", 1] == 14.0 - 4.0
    assert found.host["F", 0] == 2.0
    assert found.waits == {1: HostWait(4.0, 0.0)}


def test_times_of_layers():
    # F, I and W of each partition, by the shares of its layers' forwards.
    assert figures().layer_times == pytest.approx([1, 3, 6, 6])
