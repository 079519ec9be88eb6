"""Tables as text."""

import pytest

from torchgpipe.show.tables import aligned, as_mib, in_bytes, in_gib


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


def test_bytes_of_devices():
    assert [in_gib(0), in_gib(3 * 2**29)] == ["0.00 GiB", "1.50 GiB"]
    assert [as_mib(0), as_mib(3 * 2**19)] == ["0.0", "1.5"]
