"""The choice of what cells keep, and mistakes in it."""

import pytest
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchgpipe import Offload
from torchgpipe.partition.keeping import (
    checked_keepings,
    keepings_of,
    offload_of,
    recomputed_by,
    words_of,
)


def test_offload_is_a_value():
    assert Offload() == Offload(share=1.0) == offload_of("offload")
    assert offload_of(Offload(0.5)) == Offload(share=0.5)
    assert offload_of("always") is None
    assert repr(Offload(0.5)) == "Offload(share=0.5)"
    assert len({Offload(), Offload(1.0), Offload(0.5)}) == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"share": 0}, ValueError, r"at most 1 \(share: 0\); pass 0.5"),
        ({"share": 1.5}, ValueError, r"share: 1.5"),
        ({"share": float("nan")}, ValueError, r"share: nan"),
        ({"share": "half"}, TypeError, r"share: 'half'"),
    ],
)
def test_bad_chooses(options, error, match):
    with pytest.raises(error, match=match):
        Offload(**options)


def test_modes_of_partitions():
    modes = checked_keepings(["offload", Offload(0.5), "always"], 3)
    assert keepings_of(modes, 3) == ("offload", Offload(0.5), "always")
    assert words_of(modes, 3) == ("offload", "Offload(share=0.5)", "always")
    assert [*map(recomputed_by, modes)] == ["never", "never", "always"]
    assert keepings_of(Offload(), 2) == (Offload(), Offload())


@pytest.mark.parametrize(
    "given",
    ["host", None, 1, ["offload", "host"], lambda: None, create_selective_checkpoint_contexts],
)
def test_unknown_modes(given):
    with pytest.raises(ValueError, match=r"'never' and 'offload', an Offload, or "):
        checked_keepings(given, 2)
