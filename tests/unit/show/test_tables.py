"""Tables as text."""

import pytest

from torchgpipe.show.tables import aligned, in_bytes


def test_columns():
    rows = [["name", "size", "place"], ["a", "1", "cpu"], ["longer", "1000", ""]]
    assert aligned(rows).split("\n") == [
        "name    size  place",
        "a          1    cpu",
        "longer  1000",
    ]
    assert aligned(rows, {0, 2}).split("\n") == [
        "name    size  place",
        "a          1  cpu",
        "longer  1000",
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 * 1024**3, "3.0 GiB"),
        (5 * 1024**5, "5120.0 TiB"),
    ],
)
def test_bytes(size, text):
    assert in_bytes(size) == text
