"""A pipelined Trainer does what the Trainer does with the plain model."""

import copy
import os

import pytest
import torch
from torch.nn import functional as F

from tests.examples import MISSING
from tests.support.architectures import build

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe import MappedGPipe  # noqa: E402
from torchgpipe.transformers import pipelined  # noqa: E402


class WithOwnLoss(transformers.Trainer):
    """Compute what trainers of preferences do: two forwards, another model, a loss of logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert isinstance(model, type(self.model))
        labels = inputs.pop("labels")
        out = model(**inputs)
        other = model(input_ids=inputs["input_ids"].flip(1))
        with torch.no_grad():
            fixed = copy.deepcopy(self.model)(**inputs)
        mixed = out.logits - 0.1 * other.logits - 0.1 * fixed.logits
        loss = F.cross_entropy(mixed.flatten(0, 1), labels.flatten())
        return (loss, {"loss": loss, "logits": out.logits}) if return_outputs else loss


def model_of(name):
    return build(name)[0]


def rows(count=14, length=6):
    """Rows of which some labels count nowhere: as many as differ from row to row."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(3, 32, (2, length), generator=generator) for _ in range(count)]
    for k, (_, labels) in enumerate(found):
        labels[: k % length] = -100
    return [{"input_ids": ids, "labels": labels} for ids, labels in found]


def images():
    pixels = torch.rand(14, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return [{"pixel_values": x, "labels": torch.tensor(k % 3)} for k, x in enumerate(pixels)]


def made(trainer, model, folder, data, given=None, **options):
    chosen = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 5,
        "max_steps": 3,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **options,
    }
    arguments = transformers.TrainingArguments(str(folder), **chosen)
    return trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data,
        **{
            "compute_metrics": lambda seen: {"labels": float(seen.label_ids.sum())},
            **(given or {}),
        },
    )


def wrapped(model, **options):
    return MappedGPipe(model, {"": "cpu"}, **{"chunks": 3, **options})


def assert_same_weights(model, other):
    for own, expected in zip(model.parameters(), other.parameters(), strict=True):
        # The gradient of a bias of keys is zero but for rounding, which Adam makes larger. A step
        # moves other weights by about 1e-2.
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"gradient_accumulation_steps": 2}),  # Divides by the number that it is told.
        ("bert", {"gradient_accumulation_steps": 2}),  # Ignores it.
        ("t5", {}),  # Does not shift labels.
        ("vit", {}),  # One label for each row.
        ("llama", {"label_smoothing_factor": 0.1}),
        ("llama", {"own": True}),
    ],
)
def test_steps_and_evaluation(name, options, tmp_path):
    model, data = model_of(name), images() if name == "vit" else rows()
    options = dict(options)
    trainer = WithOwnLoss if options.pop("own", False) else transformers.Trainer
    plain = made(trainer, copy.deepcopy(model), tmp_path, data, **options)
    own = made(pipelined(trainer), wrapped(model), tmp_path, data, **options)
    for each in (plain, own):
        each.train()
    found, expected = (
        [(x["loss"], x["grad_norm"]) for x in each.state.log_history if "loss" in x]
        for each in (own, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_same_weights(own.model, plain.model)
    metrics, wanted = own.evaluate(), plain.evaluate()
    assert metrics["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)
    assert metrics["eval_labels"] == wanted["eval_labels"]
    one, other = (each.predict(data).predictions for each in (own, plain))
    assert [x.shape for x in tuple(one)] == [x.shape for x in tuple(other)]


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


def test_training_goes_on_from_its_files_and_from_the_best(tmp_path):
    data = rows()
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    saving |= {"load_best_model_at_end": True}
    model = model_of("gpt2")  # Its head is tied.
    whole = made(
        pipelined(transformers.Trainer), wrapped(copy.deepcopy(model)), tmp_path, data, **saving
    )
    whole.train()
    first = f"{tmp_path}/checkpoint-1"
    assert "config.json" in os.listdir(first)
    again = made(
        pipelined(transformers.Trainer), wrapped(copy.deepcopy(model)), tmp_path, data, **saving
    )
    again.train(resume_from_checkpoint=first)
    assert_same_weights(again.model, whole.model)
    best = transformers.GPT2LMHeadModel.from_pretrained(whole.state.best_model_checkpoint)
    assert_same_weights(whole.model, best)


def test_adapters_alone_are_saved(tmp_path):
    peft = pytest.importorskip("peft", exc_type=MISSING)
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(model_of("llama"), config)
    own = made(pipelined(transformers.Trainer), wrapped(model), tmp_path, rows(), max_steps=1)
    own.train()
    own.save_model(str(tmp_path / "saved"))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {*os.listdir(tmp_path / "saved")}
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_text_is_generated(tmp_path):
    model, found = model_of("t5"), []
    options = {"predict_with_generate": True, "generation_max_length": 5}
    for kind, one in (
        (transformers.Seq2SeqTrainer, copy.deepcopy(model)),
        (pipelined(transformers.Seq2SeqTrainer), wrapped(model)),
    ):
        arguments = transformers.Seq2SeqTrainingArguments(
            str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, **options
        )
        seen = kind(one, arguments).predict(rows(4))
        found.append((seen.predictions.tolist(), seen.metrics["test_loss"]))
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)


def test_a_model_that_the_trainer_makes(tmp_path):
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = pipelined(transformers.Trainer)
    own = trainer(args=arguments, model_init=lambda: wrapped(model_of("llama")))
    assert own.model is own.pipe.module


def test_errors(tmp_path):
    with pytest.raises(TypeError, match=r"takes a class of Trainers \(trainer: dict\); pass"):
        pipelined(dict)
    trainer = pipelined(transformers.Trainer)
    assert pipelined(trainer) is trainer
    with pytest.raises(TypeError, match=r"a wrapped one \(model: Linear\); pass MappedGPipe"):
        trainer(torch.nn.Linear(1, 1))
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    arguments.torch_compile = True
    with pytest.raises(ValueError, match=r"takes no torch_compile .*; compile the modules"):
        trainer(wrapped(model_of("llama")), arguments)


def test_a_trainer_that_gives_the_model_adapters_itself(tmp_path):
    class Adapting(transformers.Trainer):
        def __init__(self, model, args):
            super().__init__(torch.nn.Sequential(model), args)

    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="trained: Sequential.*adapters first"):
        pipelined(Adapting)(wrapped(model_of("llama")), arguments)


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
