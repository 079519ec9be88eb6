"""The calls of a pipelined Trainer's model: losses of micro-batches, and what else they return."""

import copy

import pytest
import torch

from tests.examples import MISSING
from tests.unit.transformers.test_trainer import made, model_of, rows, wrapped

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe import Chunks, MappedGPipe  # noqa: E402
from torchgpipe.transformers import loss_of, pipelined  # noqa: E402


def test_an_auxiliary_loss_becomes_a_mean(tmp_path):
    model, data = model_of("mixtral"), rows()
    model.config.output_router_logits = True
    pipe = wrapped(copy.deepcopy(model))
    own = made(pipelined(transformers.Trainer), pipe, tmp_path, data)
    batch = own.data_collator(data[:4])
    with torch.no_grad():
        loss = own.compute_loss(pipe.module, dict(batch), num_items_in_batch=torch.tensor(9))
        parts = [{key: x[k : k + 1] for key, x in batch.items()} for k in range(4)]
        pairs = [{key: torch.cat([x[key] for x in parts[:2]]) for key in batch}, *parts[2:]]
        each = [model(**pair, num_items_in_batch=torch.tensor(9)) for pair in pairs]
    counts = [int((pair["labels"][:, 1:] != -100).sum()) for pair in pairs]
    weight = model.config.router_aux_loss_coef
    means = [weight * out.aux_loss * n / sum(counts) for out, n in zip(each, counts)]
    expected = sum(out.loss - weight * out.aux_loss for out in each) + sum(means)
    torch.testing.assert_close(loss, expected)


def test_logits_that_nobody_looks_at_are_not_kept(tmp_path):
    pipe, seen = wrapped(model_of("llama")), []
    pipe.register_forward_hook(lambda pipe, args, out: seen.append([*out]))
    own = made(pipelined(transformers.Trainer), pipe, tmp_path, rows(4), max_steps=1)
    own.train()
    own.evaluate()
    assert seen == [["loss"], ["loss", "logits"]]
    assert not pipe.module._forward_hooks


def test_answers_behind_the_end_of_their_rows(tmp_path):
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, intermediate_size=16)
    model = transformers.BertForQuestionAnswering(config).eval()
    ids, ends = torch.randint(3, 32, (4, 6)), torch.tensor([1, 2, 50, 50])
    batch = {"input_ids": ids, "start_positions": ends, "end_positions": ends}
    expected = model(**batch).loss
    own = made(pipelined(transformers.Trainer), wrapped(model, chunks=2), tmp_path, [])
    with torch.no_grad():
        torch.testing.assert_close(own.compute_loss(model, dict(batch)), expected.detach())


def test_a_causal_model_with_a_loss_of_its_own(tmp_path):
    sizes = {"vocab_size": 32, "d_model": 16, "decoder_layers": 1, "decoder_ffn_dim": 16}
    config = transformers.BartConfig(**sizes, decoder_attention_heads=2, pad_token_id=0)
    model = transformers.BartForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(3, 32, (4, 6)), "labels": torch.randint(3, 32, (4, 6))}
    batch["labels"][:2, 1:], batch["labels"][2:, 2:] = -100, -100
    expected = model(**batch).loss
    own = made(pipelined(transformers.Trainer), wrapped(model, chunks=2), tmp_path, [])
    with torch.no_grad():
        torch.testing.assert_close(own.compute_loss(model, dict(batch)), expected.detach())


def test_no_label_that_counts(tmp_path):
    model = model_of("llama").eval()
    batch = {"input_ids": torch.ones(4, 6, dtype=torch.long), "labels": torch.full((4, 6), -100)}
    own = made(pipelined(transformers.Trainer), wrapped(model), tmp_path, [])
    with torch.no_grad():
        assert own.compute_loss(model, dict(batch)).isnan()
        # Another mini-batch of the step has labels.
        assert own.compute_loss(model, dict(batch), num_items_in_batch=torch.tensor(9)) == 0


@pytest.mark.parametrize("kind", ["rows", "ready"])
def test_loss_of_a_mini_batch(kind):
    """A loop of one's own has the loss of the plain model, whose labels count one by one."""
    model = model_of("llama")
    batch = transformers.default_data_collator(rows()[:6])
    expected = model(**batch).loss
    pipe = MappedGPipe(model, {"": "cpu"}, chunks=3)
    given = batch
    if kind == "ready":
        given = [{key: x[k : k + 2] for key, x in batch.items()} for k in (0, 2, 4)]
    output = pipe(**(batch if kind == "rows" else Chunks.of(given)))
    torch.testing.assert_close(loss_of(pipe, output, given), expected)
    means = [x.loss.mean() for x in (output if kind == "ready" else [output])]
    assert not torch.stack(means).mean().isclose(expected, rtol=1e-5)
    with pytest.raises(ValueError, match="one loss for each micro-batch"):
        loss_of(pipe, pipe(**{key: x[:2] for key, x in batch.items()}), batch)
