"""The demo, at tiny size."""

from functools import partial

import pytest

from tests.examples import MISSING

pytest.importorskip("sklearn", exc_type=MISSING)
pytest.importorskip("tqdm", exc_type=MISSING)

from examples import digits


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Reduce the demo to few batches, and to no time for measuring layers."""
    images = [x[: 2 * digits.BATCH] for x in digits.data()]
    monkeypatch.setattr(digits, "data", lambda: images)
    balance = partial(digits.balance_by_time, timeout=0)
    monkeypatch.setattr(digits, "balance_by_time", balance)


def test_digits(capsys):
    status = digits.main(["--epochs", "1", "--checkpoint", "always"])
    assert status == 1, "one epoch is not enough for 97 %"
    assert "Not as it should be" in capsys.readouterr().out
