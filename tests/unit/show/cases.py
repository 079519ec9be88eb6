"""Spans to draw and to count."""

from torchgpipe.show.span import Stream, computation, copy

A, B = Stream("cuda:0", 0), Stream("cuda:1", 0)


def step():
    """Two micro-batches in two partitions, without a copy but the first."""
    return [
        computation(A, 0, 1, (0, "F", 0)),
        copy(Stream("cuda:1", 3), 1, 1.5, 0, 1, 0),
        computation(A, 1, 2, (0, "F", 1)),
        computation(B, 1.5, 2.5, (1, "F", 0)),
        computation(B, 2.5, 3.5, (1, "R", 0)),
        computation(B, 3.5, 5.5, (1, "B", 0)),
        computation(A, 6, 8, (0, "B", 0)),
    ]
