"""Lightning trains a GPipe as a plain loop does."""

import pytest

from tests.examples import MISSING

pytest.importorskip("lightning.pytorch", exc_type=MISSING)

from examples import ball, with_lightning

pytestmark = [
    # Lightning uses a deprecated function of PyTorch.
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
]


@pytest.mark.parametrize(
    "options", [[], ["--accumulate", "5"], ["--precision", "bf16-mixed"]], ids=str
)
def test_main(options, capsys, monkeypatch):
    # Eleven mini-batches, which neither two nor five divide.
    few = ball.loader(11 * 32)
    for module in (ball, with_lightning):
        monkeypatch.setattr(module, "loader", lambda *_: few)
    assert with_lightning.main(["--epochs", "2", *options]) == 0
    assert "As in a plain loop" in capsys.readouterr().out
