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
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    arguments.torch_compile = True
    with pytest.raises(ValueError, match=r"takes no torch_compile .*; compile the modules"):
        trainer(wrapped(model_of("llama")), arguments)


def test_a_trainer_that_gives_the_model_adapters_itself(tmp_path):
    class Adapting(transformers.Trainer):
        def __init__(self, model, args):
            super().__init__(torch.nn.Sequential(model), args)

    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="trained: Sequential.*plain model"):
        pipelined(Adapting)(wrapped(model_of("llama")), arguments)
