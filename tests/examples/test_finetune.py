"""Fine-tuning, of all weights and of adapters, at tiny size."""

import pytest

from tests.examples import MISSING

pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=MISSING)
pytest.importorskip("accelerate", exc_type=MISSING)

from examples import finetune

TINY = ["--rows", "8", "--length", "12", "--steps", "3", "--rate", "0.01"]


def test_all_weights(tmp_path, capsys):
    assert finetune.main([*TINY, "--out", str(tmp_path)]) == 0
    assert f"Saved to {tmp_path}" in capsys.readouterr().out


def test_adapters_and_packed_rows(tmp_path):
    pytest.importorskip("peft", exc_type=MISSING)
    # Adapters learn slowly, and of what README says today.
    more = ["--steps", "8", "--rate", "0.05", "--lora", "2", "--packed"]
    assert finetune.main([*TINY, *more, "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "model.safetensors").exists()


def test_a_model_of_a_folder(tmp_path, monkeypatch):
    finetune.language_model(vocab_size=300).save_pretrained(tmp_path)

    class Tokenizer:
        eos_token_id = 299

        def __call__(self, lines):
            return {"input_ids": [[*line.encode()] for line in lines]}

    monkeypatch.setattr(finetune.AutoTokenizer, "from_pretrained", lambda name: Tokenizer())
    assert finetune.main([*TINY, "--model", str(tmp_path), "--out", str(tmp_path / "out")]) == 0


def test_rows():
    assert [x["input_ids"].tolist() for x in finetune.rows_of([[5, 6, 7], [8]], 2, True)] == [
        [5, 6],
        [7, 8],
    ]
    rows = finetune.rows_of([[5, 6, 7], [8]], 2, False)
    assert finetune.collated(rows)["labels"].tolist() == [[5, 6], [8, -100]]
