"""Options that an example cannot take are errors of argparse."""

import importlib

import pytest

from tests.examples import BROKEN, MISSING

#: By example: what its options do not go below, and whether it has --checkpoint.
MINIMA = {
    "compiled": ({"steps": 1, "chunks": 1}, True),
    "data_parallel": ({"epochs": 1, "rows": 64, "accumulate": 1}, True),
    "diffusion_lora": ({"steps": 2, "rank": 1, "chunks": 1}, True),
    "digits": ({"epochs": 1, "chunks": 1, "threads": 1}, True),
    "image_model": ({"epochs": 2, "rows": 32}, True),
    "language_model": ({"epochs": 2, "rows": 1, "chunks": 1}, True),
    "larger_than_a_device": ({"blocks": 1, "width": 2}, False),
    "mixed_precision": ({"steps": 1, "chunks": 1}, True),
    "saving": ({"epochs": 1, "chunks": 1}, False),
    "training_loop": ({"steps": 2, "chunks": 1}, True),
    "with_accelerate": ({"epochs": 2, "chunks": 1, "accumulate": 1}, False),
    "with_lightning": ({"epochs": 2, "chunks": 1, "accumulate": 1}, False),
    "with_transformers": ({"epochs": 2, "rows": 1, "chunks": 1, "accumulate": 1}, False),
}


@pytest.fixture(params=MINIMA)
def name(request):
    return request.param


@pytest.fixture
def refused(name, capsys):
    missing = BROKEN if name == "image_model" else MISSING
    try:
        example = importlib.import_module(f"examples.{name}")
    except missing as error:
        pytest.skip(str(error))

    def refused(*arguments):
        with pytest.raises(SystemExit) as caught:
            example.main([*arguments])
        assert caught.value.code == 2
        return capsys.readouterr().err

    return refused


def test_integers(name, refused):
    for option, minimum in MINIMA[name][0].items():
        said = f"argument --{option}: must be at least {minimum} (value: {minimum - 1})"
        assert said in refused(f"--{option}", str(minimum - 1))
        assert "invalid integer value: 'some'" in refused(f"--{option}", "some")


def test_checkpoint(name, refused):
    if MINIMA[name][1]:
        said = refused("--checkpoint", "sometimes")
        assert all(mode in said for mode in ("always", "except_last", "never"))


@pytest.mark.parametrize("name", ["image_model"], indirect=True)
def test_micro_batches_of_one_image(refused):
    assert "invalid choice: 17" in refused("--chunks", "17")


@pytest.mark.parametrize("name", ["larger_than_a_device"], indirect=True)
def test_odd_width(refused):
    assert "must be even (value: 3)" in refused("--width", "3")
