"""Hardware as a value."""

from dataclasses import replace

import pytest
import torch

from torchgpipe.testing import Hardware
from torchgpipe.testing.hardware import NAMED, hardware_of

FP32 = {torch.float32: 1e12}


@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    found = hardware_of(name)
    assert found.name == name
    assert found is hardware_of(found)
    assert torch.float32 in found.rates


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"memory": 0}, ValueError, r"positive numbers.*memory: 0\); take it from"),
        ({"bandwidth": "fast"}, TypeError, r"bandwidth: 'fast'"),
        ({"link": -1.0}, ValueError, r"link: -1.0"),
        ({"launch": -1.0}, ValueError, r"launch: -1.0"),
        ({"rates": [1e12]}, TypeError, "rates are a table"),
        ({"rates": {"float32": 1e12}}, TypeError, r"by dtype \(rates: 'float32'"),
        ({"rates": {torch.float32: 0}}, ValueError, r"rates\[torch.float32\]: 0"),
        ({"efficiency": {"conv": 0.5}}, ValueError, r"efficiency: 'conv'\); name one"),
        ({"efficiency": {"matmul": 0}}, ValueError, r"matmul: 0"),
    ],
)
def test_errors(change, error, words):
    good = {"memory": 1, "rates": FP32, "bandwidth": 1.0, "link": 1.0, "host_link": 1.0}
    assert Hardware(**good, launch=0).memory == 1
    with pytest.raises(error, match=words):
        Hardware(**(good | change))


def test_unknown_names():
    with pytest.raises(ValueError, match=r"a100-40gb.*\(device: 'abacus'\); pass torchgpipe"):
        hardware_of("abacus")


def test_a_baseline_calibrates():
    found = NAMED["p40-24gb"]
    slower = found.calibrated(1.0, 2.0, "ResNet-50, 118 images")
    assert slower.efficiency == dict.fromkeys(("matmul", "convolution", "attention", "other"), 0.5)
    assert slower.launch == 2 * found.launch
    assert slower.baseline == "ResNet-50, 118 images"
    again = slower.calibrated(2.0, 2.0, "again")
    assert replace(again, baseline="") == replace(slower, baseline="")
    with pytest.raises(ValueError, match=r"measured: 0"):
        found.calibrated(1.0, 0, "")
