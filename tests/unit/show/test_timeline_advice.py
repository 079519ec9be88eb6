"""Advice as a sentence."""

from torchgpipe.show.timeline import Advice


def test_sentence():
    advice = Advice("cuda:2 computes 31% longer than the mean", {"balance": [3, 4]}, 0.123)
    text = "cuda:2 computes 31% longer than the mean: balance=[3, 4] is expected to take 12% less"
    assert str(advice) == text
    other = Advice("devices wait", {"schedule": "zbh1"}, 0.5, "more memory")
    expected = "devices wait: schedule='zbh1' is expected to take 50% less (more memory)"
    assert str(other) == expected


def test_code_that_has_to_change():
    advice = Advice("layer 6 copies", {}, 0.35, remedy="without that, the step")
    assert str(advice) == "layer 6 copies: without that, the step is expected to take 35% less"
