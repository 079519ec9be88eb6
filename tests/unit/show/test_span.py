"""Spans: their names, and the order of streams."""

from torchgpipe.show.span import Span, Stream, computation, copy, order


def test_names():
    assert str(Stream(1, 2)) == "stream 2 of virtual:1"
    assert str(Stream("cuda:1", 0)) == "stream 0 of cuda:1"


def test_order_of_devices_is_that_of_their_numbers():
    streams = [Stream("cuda:10", 0), Stream("cuda:9", 1), Stream("cuda:9", 0), Stream(2, 0)]
    assert sorted(streams, key=order) == [streams[2], streams[1], streams[0], streams[3]]


def test_titles():
    """All that is known of a piece of work, each word once."""
    stream = Stream(0, 0)
    cell = {"kind": "F", "stage": 0, "microbatch": 3}
    span = Span(stream, 0, 1, "addmm", **cell, layer="encoder.0", layer_type="Linear")
    assert span.cell == "0F3"
    assert span.title == "0F3 encoder.0 (Linear) addmm"
    assert str(span) == f"{span.title} on stream 0 of virtual:0 from 0 to 1"
    assert Span(stream, 0, 1, "addmm", **cell).title == "0F3 addmm"
    assert Span(stream, 0, 1, "addmm").title == "addmm"
    assert computation(stream, 0, 1, (0, "F", 3)).title == "0F3"
    assert copy(stream, 0, 1, 0, 1, 5).title == "0 to 1 5"
    leaving = Span(stream, 0, 1, "as_strided", kind="copy", stage=0, microbatch=5)
    assert leaving.title == "from 0 5 as_strided"
