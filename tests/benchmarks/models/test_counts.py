"""The models have the published numbers of parameters, and layers for published balances."""

import pytest
import torch

from benchmarks.models import amoebanetd, gpt, unet
from tests.benchmarks.models import count
from tests.support.size import soak


def rounded(number, published):
    """Round a number to as many digits as were published."""
    unit = {"M": 1e6, "B": 1e9}[published[-1]]
    digits = len(published[:-1].partition(".")[2])
    return f"{number / unit:.{digits}f}{published[-1]}"


# torchgpipe's paper, and its benchmarks/amoebanetd-memory.
@pytest.mark.parametrize(
    ("size", "exact", "published"),
    [
        ((18, 208), 81_505_540, "81.5M"),
        ((18, 416), 319_024_120, "319.0M"),
        ((18, 544), 542_734_840, "542.7M"),
        pytest.param((36, 544), 1_055_832_376, "1.06B", marks=soak),
        pytest.param((72, 512), 1_844_858_344, "1.84B", marks=soak),
    ],
)
def test_amoebanetd(size, exact, published):
    layers, filters = size
    with torch.device("meta"):
        model = amoebanetd(1000, layers, filters)
    assert count(model) == exact
    assert rounded(exact, published) == published


# The same, benchmarks/unet-memory, with the balances of torchgpipe 0.0.5 there.
@pytest.mark.parametrize(
    ("size", "exact", "published", "balance"),
    [
        ((6, 72), 362_157_516, "362.2M", None),
        ((11, 128), 2_213_834_176, "2.21B", [505]),
        ((24, 128), 4_993_859_008, "4.99B", [526, 551]),
        ((24, 160), 7_802_903_600, "7.80B", [472, 54, 36, 515]),
        pytest.param(
            (48, 160), 15_822_206_000, "15.82B", [800, 140, 62, 36, 36, 36, 36, 987], marks=soak
        ),
    ],
)
def test_unet(size, exact, published, balance):
    convolutions, channels = size
    with torch.device("meta"):
        model = unet(5, convolutions, channels)
    assert count(model) == exact
    assert rounded(exact, published) == published
    assert balance is None or sum(balance) == len(model)


# Numbers of GPT2Config of Transformers, with a head that shares its weights.
@pytest.mark.parametrize(
    ("layers", "width", "heads", "tied"),
    [
        (12, 768, 12, 124_439_808),
        (24, 1024, 16, 354_823_168),
        pytest.param(36, 1280, 20, 774_030_080, marks=soak),
        pytest.param(48, 1600, 25, 1_557_611_200, marks=soak),
    ],
)
def test_gpt(layers, width, heads, tied):
    with torch.device("meta"):
        model = gpt(layers=layers, width=width, heads=heads)
    assert count(model) == tied + 50257 * width
