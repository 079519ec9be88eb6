"""The choice of what cells keep, and mistakes in it."""

import pytest
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from torchgpipe import GPipe, Offload
from torchgpipe.partition.keeping import (
    checked_keepings,
    keepings_of,
    offload_of,
    recomputed_by,
    verify_words,
    words_of,
)


def test_offload_is_a_value():
    assert Offload() == Offload(share=1.0, ahead=1) == offload_of("offload")
    assert offload_of(Offload(0.5)) == Offload(share=0.5)
    assert offload_of("always") is None
    assert repr(Offload(0.5)) == "Offload(share=0.5, ahead=1)"
    assert len({Offload(), Offload(1.0, 1), Offload(ahead=2)}) == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"share": 0}, ValueError, r"at most 1 \(share: 0\); pass 0.5"),
        ({"share": 1.5}, ValueError, r"share: 1.5"),
        ({"share": float("nan")}, ValueError, r"share: nan"),
        ({"share": "half"}, TypeError, r"share: 'half'"),
        ({"ahead": 0}, ValueError, r"a positive integer.*\(ahead: 0\); pass 1"),
        ({"ahead": 1.5}, ValueError, r"ahead: 1.5"),
        ({"ahead": True}, ValueError, r"ahead: True"),
    ],
)
def test_bad_chooses(options, error, match):
    with pytest.raises(error, match=match):
        Offload(**options)


def test_modes_of_partitions():
    modes = checked_keepings(["offload", Offload(0.5), "always"], 3)
    assert keepings_of(modes, 3) == ("offload", Offload(0.5), "always")
    assert words_of(modes, 3) == ("offload", "Offload(share=0.5, ahead=1)", "always")
    assert [*map(recomputed_by, modes)] == ["never", "never", "always"]
    assert keepings_of(Offload(), 2) == (Offload(), Offload())


@pytest.mark.parametrize(
    "given",
    ["host", None, 1, ["offload", "host"], lambda: None, create_selective_checkpoint_contexts],
)
def test_unknown_modes(given):
    with pytest.raises(ValueError, match=r"'never' and 'offload', an Offload, or "):
        checked_keepings(given, 2)


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_wrapper_has_the_mode_that_it_was_given():
    model = GPipe(layers(), [1, 1], devices=["cpu", "cpu"], checkpoint="offload")
    assert model.checkpoint == "offload"
    model.checkpoint = Offload(share=0.5)
    assert model.checkpoint == Offload(share=0.5)
    model.checkpoint = ["never", Offload()]
    assert model.checkpoint == ["never", Offload()]
    assert "checkpoint=['never', Offload(share=1.0, ahead=1)]" in repr(model)
    assert [row.checkpoint for row in model.describe().rows] == ["never", str(Offload())]


def test_words_alone():
    for modes in (("offload",), (Offload(),), ("never", Offload(0.5))):
        with pytest.raises(ValueError, match=r"^it keeps all .* \(checkpoint: .*; do not$"):
            verify_words(modes, "it", "do not")
    verify_words(("never", "always"), "it", "do not")
