"""The shares of a step: who computed, who waited, and why."""

from dataclasses import replace

from tests.unit.show.cases import A, B, step
from torchgpipe.show.shares import shares, table
from torchgpipe.show.span import Stream, computation, trip


def test_shares():
    first, second = shares(step())
    assert (first.device, second.device) == (A.device_name, B.device_name)
    assert (first.busy, first.recompute, first.copies) == (4 / 8, 0, 0)
    assert (second.busy, second.recompute, second.copies) == (3 / 8, 1 / 8, 0.5 / 8)
    assert first.bubble == second.bubble == 0.5
    assert first.host is None


def test_host_bound():
    spans = [replace(x, issued=x.start if x.kind == "F" else 0.0) for x in step()]
    first, second = shares(spans)
    # The second partition could not begin before 1.5, since nobody had issued anything.
    assert (first.host, second.host) == (0, 1.5 / 8)


def test_overlaps_are_busy_once():
    spans = [computation(A, 0, 4, (0, "F", 1)), computation(A, 1, 3, (0, "B", 0))]
    assert shares(spans)[0].busy == 1


def test_table():
    text = table(shares(step()), {"cuda:1": 3 * 2**20}, {})
    assert text.splitlines()[0].split()[-2:] == ["peak", "MiB"]
    assert [row.split()[-1] for row in text.splitlines()[1:]] == ["-", "3.0"]
    lines = [Stream("cpu", 0), Stream("cpu", 1)]
    text = table(shares([computation(x, 0, 1, (0, "F", 0)) for x in lines]), {}, {})
    assert [row[:7] for row in text.splitlines()[1:]] == ["cpu (0)", "cpu (1)"]


def test_what_cells_keep_on_the_host():
    copies = [
        trip(B._replace(number=k), k, k + 2, way, 1, 0) for k, way in ((4, "out"), (5, "back"))
    ]
    found = shares([*step(), *copies])
    assert [(x.away, x.copies) for x in found] == [(0, 0), (0.5, 0.5 / 8)]
    head, *rows = table(found, {}, {"cuda:1": 2**20}).splitlines()
    assert head.split()[-3:] == ["offload", "host", "MiB"]
    assert [row.split()[-2:] for row in rows] == [["0.0%", "-"], ["50.0%", "1.0"]]


def test_streams_of_one_device_count_once():
    streams = [Stream(0, 0), Stream(0, 1)]
    spans = [computation(streams[0], 0, 4, (0, "F", 0)), computation(streams[1], 3, 6, (2, "F", 0))]
    spans.append(computation(Stream(1, 0), 0, 8, (1, "F", 0)))
    first, second = shares(spans)
    assert (first.device, first.busy, first.bubble) == ("virtual:0", 6 / 8, 2 / 8)
    assert (second.device, second.busy) == ("virtual:1", 1)


def test_computing_again_on_two_streams_counts_once():
    streams = [Stream(0, 0), Stream(0, 1)]
    spans = [computation(x, 0, 2, (0, "R", 0)) for x in streams]
    spans.append(computation(streams[0], 2, 4, (0, "B", 0)))
    (found,) = shares(spans)
    assert (found.recompute, found.busy, found.bubble) == (0.5, 0.5, 0)
