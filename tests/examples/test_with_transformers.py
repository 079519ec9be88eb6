"""Transformers' Trainer leaves a GPipe on its devices, and trains it as the plain model."""

from argparse import Namespace
from functools import partial

import pytest
import torch
from torch import nn

from tests.examples import MISSING
from torchgpipe import GPipe

pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=MISSING)
pytest.importorskip("accelerate", exc_type=MISSING)

from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer import logger

from examples import with_transformers
from examples.language_model import language_model, loss_of, sequential

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
OPTIONS = Namespace(epochs=1, rows=32, accumulate=1, precision="no")


@pytest.fixture(autouse=True)
def quiet():
    level = logger.level
    yield
    logger.setLevel(level)


class Pipelined(Trainer):
    """A Trainer that trains a GPipe itself, and computes the loss outside."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(inputs["input_ids"], inputs["attention_mask"])
        loss = loss_of(logits, labels).to(self.args.device)
        return (loss, {"logits": logits}) if return_outputs else loss


def trainer_of(model, folder, monkeypatch, **options):
    monkeypatch.setattr(with_transformers, "Trainer", Pipelined)
    options = {"remove_unused_columns": False, **options}
    return with_transformers.trainer(model, str(folder), OPTIONS, **options)


def test_main(capsys, monkeypatch):
    monkeypatch.setattr(with_transformers, "language_model", partial(language_model, **TINY))
    options = ["--epochs", "2", "--rows", "16", "--accumulate", "2", "--precision", "bf16"]
    assert with_transformers.main(options) == 0
    assert "All learnt the same" in capsys.readouterr().out


def test_gpipe_itself(tmp_path, monkeypatch):
    layers = sequential(language_model(tie_word_embeddings=False, **TINY))
    model = GPipe(layers, [2, 2], devices=["cpu"] * 2, chunks=4)
    trainer = trainer_of(model, tmp_path, monkeypatch, label_names=["labels"])
    trainer.train()
    metrics = trainer.evaluate()
    data = with_transformers.Rows(32).columns
    with torch.no_grad():
        model.eval()
        found = [
            loss_of(
                model(data["input_ids"][rows], data["attention_mask"][rows]), data["labels"][rows]
            )
            for rows in (slice(8 * k, 8 * k + 8) for k in range(4))
        ]
    assert metrics["eval_loss"] == pytest.approx(float(sum(found) / 4), rel=1e-5)
    # Its file says where layers were; it loads into the plain model through any GPipe.
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(name.startswith("partitions.") for name in saved)
    fresh = sequential(language_model(tie_word_embeddings=False, **TINY))
    GPipe(fresh, [1, 1, 2], devices=["cpu"] * 3).load_state_dict(saved)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_tied_weights_of_a_gpipe_itself(tmp_path, monkeypatch):
    model = GPipe(sequential(language_model(**TINY)), [2, 2], devices=["cpu"] * 2, chunks=4)
    with pytest.raises(RuntimeError, match="share memory"):
        trainer_of(model, tmp_path, monkeypatch).train()


@pytest.mark.parametrize("several", [True, False])
def test_machine_with_several_gpus(several, tmp_path, monkeypatch):
    """GPUs are simulated by their names, and nothing computes on them."""
    model = GPipe(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), [1, 1], devices=["cpu"] * 2)
    places = {"partitions.0.0": torch.device("cuda:0"), "partitions.1.1": torch.device("cuda:1")}
    if not several:
        places["partitions.1.1"] = torch.device("cuda:0")
    monkeypatch.setattr(GPipe, "hf_device_map", places)
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 2
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda:0"))
    moved = []
    monkeypatch.setattr(GPipe, "to", lambda self, *args: moved.append(args))
    trainer = Trainer(model, arguments)
    assert not moved
    assert trainer.is_model_parallel == several
    # All partitions on one GPU of several: CUDA_VISIBLE_DEVICES has to hide the others.
    assert isinstance(trainer._wrap_model(model), GPipe if several else nn.DataParallel)


def test_class_of_transformers(tmp_path):
    """A class of Transformers keeps all other behaviour under GPipe."""
    plain = language_model(**TINY)
    model = with_transformers.PipelinedLlamaForCausalLM(plain.config)
    model.load_state_dict(plain.state_dict())
    model.spread(torch.randint(1, 256, (4, 8)), chunks=2)
    assert list(model.state_dict()) == list(plain.state_dict())
    ids = torch.randint(1, 256, (4, 8))
    torch.testing.assert_close(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
    model.eval()
    model(ids)
    assert not model.pipe.training
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
