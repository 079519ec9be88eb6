"""The order in which a process computes, sends and receives."""

import pytest

from torchgpipe.distributed.runtime import AHEAD, earlier
from torchgpipe.schedule.program import Op


def read(text):
    """Actions from words such as F0, +F0 (receive) and F0> (send)."""
    found = []
    for word in text.split():
        does = {"+": "receive", ">": "send"}.get(word.strip("FB0123456789"), "compute")
        word = word.strip("+>")
        found.append((does, [Op(1, word[0], int(word[1:]))]))
    return found


@pytest.mark.parametrize(
    ("lowered", "moved"),
    [
        (
            "+F0 F0 +F1 F1 +F2 F2 +F3 F3 +F4 F4",
            "+F0 +F1 +F2 +F3 F0 +F4 F1 F2 F3 F4",
        ),
        # Gradients stay where they are.
        ("F0 F0> +F1 F1 F1> +B1 B1 +B0 B0", "+F1 F0 F0> F1 F1> +B1 B1 +B0 B0"),
    ],
)
def test_receives_are_moved_up(lowered, moved):
    assert AHEAD == 3
    assert earlier(read(lowered)) == read(moved)
