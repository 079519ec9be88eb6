"""A pipelined Trainer over several devices, of which it knows one."""

import copy

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import build, spread
from tests.support.helpers import assert_no_races
from tests.support.trainers import known
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

transformers = pytest.importorskip("transformers", exc_type=MISSING)


def places(model, devices):
    """A map whose last device has the head, and so the loss."""
    return {**spread(model, devices), "lm_head": devices[-1], "model.norm": devices[-1]}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_and_predictions_come_to_the_device_of_inputs(
    smoothing, devices, tmp_path, monkeypatch
):
    from torchgpipe.transformers import pipelined

    model, inputs = build("llama")
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, places(model, devices[:2]), chunks=2)
    data = [dict(zip(inputs, row)) for row in zip(*inputs.values())]
    found = []
    for kind, one, place in (
        (transformers.Trainer, plain, torch.device("cpu")),
        (pipelined(transformers.Trainer), pipe, devices[0]),
    ):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=4,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            label_smoothing_factor=smoothing,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        known(monkeypatch, arguments, place)
        trainer = kind(one, arguments, train_dataset=data, eval_dataset=data)
        with observe() as seen:
            trainer.train()
        assert_no_races(seen)
        losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        found.append([*losses, trainer.evaluate()["eval_loss"]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_evaluation_in_half_precision(devices, tmp_path):
    """The Trainer does not bring the model to the one device that it knows."""
    from torchgpipe.transformers import pipelined

    model, inputs = build("llama")
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, places(model, devices[:2]), chunks=2)
    data = [dict(zip(inputs, row)) for row in zip(*inputs.values())]
    found = []
    for kind, one in ((transformers.Trainer, plain), (pipelined(transformers.Trainer), pipe)):
        arguments = transformers.TrainingArguments(
            str(tmp_path), bf16_full_eval=True, report_to=[], disable_tqdm=True, use_cpu=True
        )
        trainer = kind(one, arguments, eval_dataset=data)
        found.append(trainer.evaluate()["eval_loss"])
        assert {x.dtype for x in trainer.model.parameters()} == {torch.bfloat16}
    assert found[1] == pytest.approx(found[0], rel=0.01)
    assert {x.device for x in model.parameters()} == {*devices[:2]}
    assert "to" not in vars(model)


class OwnLoss(transformers.Trainer):
    """A loss of the model's own, which could add something."""

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        out = model(**inputs, **more)
        return (out.loss, out) if return_outputs else out.loss


def test_logits_that_nobody_looks_at(devices, tmp_path, monkeypatch):
    """A loss of one's own neither computes them nor brings them to the Trainer's device."""
    from torchgpipe.transformers import pipelined

    sizes = {"vocab_size": 4096, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.LlamaConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    data = [{"input_ids": torch.arange(32), "labels": torch.arange(32)}] * 8
    monkeypatch.setattr(
        transformers.TrainingArguments,
        "device",
        property(lambda self: (self._setup_devices, devices[0])[1]),
    )
    found = []
    for kind in (transformers.Trainer, OwnLoss):
        model = transformers.LlamaForCausalLM(config)
        device_map = {"model": devices[0], "lm_head": devices[1]}
        pipe = MappedGPipe(model, device_map, chunks=4, checkpoint="always")
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=1, save_strategy="no", report_to=[], disable_tqdm=True
        )
        trainer = pipelined(kind)(pipe, arguments, train_dataset=data)
        before = [*map(torch.accelerator.memory_allocated, devices[:2])]
        [*map(torch.accelerator.reset_peak_memory_stats, devices[:2])]
        trainer.train()
        after = [*map(torch.accelerator.max_memory_allocated, devices[:2])]
        found.append([y - x for x, y in zip(before, after)])
        del model, pipe, trainer
    # The logits of a micro-batch are 1 MiB.
    assert found[1] == pytest.approx(found[0], abs=2**19)


@pytest.mark.parametrize("target", ["first", "cpu"])
def test_outputs_come_to_a_device(target, devices):
    model, inputs = build("llama")
    plain = copy.deepcopy(model)
    device = devices[0] if target == "first" else torch.device("cpu")
    pipe = MappedGPipe(model, places(model, devices[:2]), chunks=2, output_device=device)
    with observe() as seen:
        out = pipe(**{key: x.to(devices[0]) for key, x in inputs.items()})
        (out.loss.mean() + out.logits.sum()).backward()
    assert_no_races(seen)
    assert {out.loss.device, out.logits.device} == {device}
    expected = plain(**inputs)
    torch.testing.assert_close(out.logits.cpu(), expected.logits, rtol=1e-4, atol=1e-5)
    (expected.loss + expected.logits.sum()).backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_a_loss_of_all_rows(mode, devices, tmp_path):
    """Images and texts are compared once, with what the towers on their devices return for all."""
    from torchgpipe.transformers import pipelined

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = {"vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 2, **sizes}
    image = {"image_size": 8, "patch_size": 4, **sizes}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=8)
    config.text_config.num_hidden_layers = config.vision_config.num_hidden_layers = 1
    model = transformers.CLIPModel(config)
    plain = copy.deepcopy(model)
    places = {"": devices[0], "vision_model": devices[1], "text_model.encoder": devices[2]}
    pipe = MappedGPipe(model, places, chunks=2, checkpoint=mode)
    rows = {"input_ids": torch.randint(3, 32, (5, 6)), "pixel_values": torch.rand(5, 3, 8, 8)}
    rows = {**rows, "return_loss": True}
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = pipelined(transformers.Trainer)(pipe, arguments)
    with observe() as seen:
        loss = trainer.compute_loss(model, dict(rows))
        loss.backward()
    assert_no_races(seen)
    expected = plain(**rows).loss
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected)
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)
