"""Advice as a sentence."""

from torchgpipe.show.timeline import Advice


def test_sentence():
    assert str(Advice("devices wait", {"chunks": 8})) == "devices wait: try chunks=8"
    other = Advice("devices wait", {"checkpoint": "never"}, "more memory")
    assert str(other) == "devices wait: try checkpoint='never' (more memory)"


def test_code_that_has_to_change():
    advice = Advice("layer 6 copies", {}, remedy="have a copy")
    assert str(advice) == "layer 6 copies: have a copy"
