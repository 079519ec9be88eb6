"""A decoder of Transformers computes under GPipe what it computes alone."""

import copy
import io
from functools import partial

import pytest
import torch

from tests.examples import MISSING
from torchgpipe import GPipe

pytest.importorskip("transformers.models.llama.modeling_llama", exc_type=MISSING)

from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from examples import language_model
from examples.language_model import loss_of, sequential

TINY = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3},
    "gpt2": {"n_embd": 16, "n_layer": 3},
}
# Llama normalises, and both soften attention if it is eager, in single precision.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def tiny(family="llama", **config):
    return language_model.language_model(family, **TINY[family], vocab_size=32, **config).double()


def padded(lengths=(9, 9, 7, 9, 4, 1, 8)):
    """Rows of several lengths; rows of the first micro-batch have no padding."""
    ids = torch.randint(1, 32, (len(lengths), 9))
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}, ids.masked_fill(mask == 0, -100)


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_parity(family, attention, checkpoint):
    model = tiny(family, attention=attention)
    plain = copy.deepcopy(model)
    pipe = GPipe(sequential(model), [2, 2, 1], devices=["cpu"] * 3, chunks=3, checkpoint=checkpoint)
    batch, labels = padded()
    expected = plain(**batch)
    output = pipe(**batch)
    torch.testing.assert_close(output, expected.logits, **CLOSE)
    loss = loss_of(output, labels)
    # That of Transformers is computed in single precision.
    torch.testing.assert_close(loss.float(), plain(**batch, labels=labels).loss, **CLOSE)
    loss.backward()
    loss_of(expected.logits, labels).backward()
    # The parameters of the model are those of the GPipe, under the names of Transformers.
    torch.testing.assert_close(gradients(model), gradients(plain), **CLOSE)


def test_padding_matters():
    batch, _ = padded()
    pipe = GPipe(sequential(tiny()), [3, 2], devices=["cpu"] * 2, chunks=3)
    seen = pipe(batch["input_ids"], batch["attention_mask"].flip(1))
    assert not torch.allclose(seen, pipe(**batch))


def test_tied_weight_stays_one():
    layers = sequential(tiny())
    model = GPipe(layers, [1, 3, 1], devices=["cpu", "meta", "cpu"])
    assert model[0].tokens.weight is model[4].head.weight


def test_saved_by_its_own_names(tmp_path):
    model = tiny()
    pipe = GPipe(sequential(model), [3, 2], devices=["cpu"] * 2, chunks=2)
    batch, labels = padded()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    loss_of(pipe(**batch), labels).backward()
    optimizer.step()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.double)
    torch.testing.assert_close(loaded(**batch).logits, pipe(**batch), **CLOSE)


def test_made_on_the_meta_device():
    model = tiny()
    file = io.BytesIO()
    torch.save(sequential(model).state_dict(), file)
    file.seek(0)
    weights = torch.load(file)
    batch, _ = padded()
    for complete in (False, True):
        with torch.device("meta"):
            empty = tiny()
        if complete:
            # No state dict has the buffers that a constructor computes.
            empty.model.rotary_emb = LlamaRotaryEmbedding(empty.config)
        pipe = GPipe(sequential(empty), [2, 3], devices=["cpu"] * 2, chunks=2)
        pipe.load_state_dict(weights)
        output = pipe(**batch)
        if complete:
            torch.testing.assert_close(output, model(**batch).logits, **CLOSE)
        else:
            assert output.isnan().all()


def test_main(capsys, monkeypatch):
    small = partial(language_model.language_model, **TINY["llama"])
    monkeypatch.setattr(language_model, "language_model", small)
    assert language_model.main(["--epochs", "2", "--rows", "16"]) == 0
    assert "Both learnt the same" in capsys.readouterr().out
