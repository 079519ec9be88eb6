"""Trainers that spread a plain model by themselves, and every way to call it in a step."""

import copy
import logging

import pytest
import torch

from tests.examples import MISSING
from tests.support.helpers import assert_no_races
from tests.support.trainers import known
from tests.unit.transformers.test_trainer import rows
from tests.virtual.test_joined_steps import model_and_places
from torchgpipe import MappedGPipe
from torchgpipe.testing import observe

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import PipelineCallback, pipelined  # noqa: E402
from torchgpipe.transformers.spread import Options, Spread  # noqa: E402


def adam(folder, **options):
    return transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=3,
        save_steps=1,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def test_a_plain_model(devices, tmp_path, monkeypatch):
    """The model comes to its devices in the first step, with the state of its optimizer."""
    plain, _ = model_and_places(devices[:2])
    one, again = copy.deepcopy(plain), copy.deepcopy(plain)
    trainer = transformers.Trainer(plain, adam(tmp_path / "plain"), train_dataset=rows(12))
    trainer.train()
    arguments, found, said = adam(tmp_path / "spread"), [], []
    monkeypatch.setattr(logging.getLogger("torchgpipe"), "warning", said.append)
    known(monkeypatch, arguments, devices[0])
    for model, stop in ((one, None), (again, tmp_path / "spread" / "checkpoint-2")):
        several = {"devices": devices[:2], "chunks": 4, "callbacks": [PipelineCallback()]}
        own = pipelined(transformers.Trainer)(model, arguments, train_dataset=rows(12), **several)
        with observe() as seen:
            own.train(resume_from_checkpoint=None if stop is None else str(stop))
        assert_no_races(seen)
        assert own.model is model
        assert [*dict.fromkeys(own.pipe.device_map.values())] == devices[:2]
        assert own.pipe.chunks == 4
        assert own.state.log_history[-1]["pipeline/bubble"] == 1 / 5
        assert said.pop().startswith(
            "2 devices, 4 micro-batches of 1 row: bubble 20%, peak 0.0 GiB on"
        )
        assert not said
        found.append([x["loss"] for x in own.state.log_history if "loss" in x])
        for x, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(x.cpu(), expected, rtol=1e-3, atol=1e-5)
    expected = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    torch.testing.assert_close(found, [expected, expected], rtol=1e-4, atol=1e-5)


class OfItsOwn(transformers.Trainer):
    """An argument of its own in front, and a step that calls the model."""

    def __init__(self, factor, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.factor = factor

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.factor * model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


class OfItsModel(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            self.model(**inputs)
        return self.model.forward(**inputs).loss


class Derived(pipelined(transformers.Trainer)):
    def training_step(self, model, inputs, num_items_in_batch=None):
        assert isinstance(model, transformers.LlamaForCausalLM)
        loss = model(**self._prepare_inputs(inputs)).loss
        self.accelerator.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("trainer", [OfItsOwn, OfItsModel, Derived])
def test_calls_of_the_model(trainer, devices, tmp_path):
    model, places = model_and_places(devices[:2])
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    pipe = MappedGPipe(model, places, chunks=4)
    front = [1.0] if trainer is OfItsOwn else []
    own = pipelined(trainer)(
        *front,
        model=pipe,
        args=adam(tmp_path, save_strategy="no"),
        train_dataset=rows(12),
    )
    own.train()
    # Two rows together prove the loss.
    assert sorted(seen) == [1] * (len(seen) - 1) + [2]
    assert own.model is own.accelerator.unwrap_model(own.model_wrapped) is model


def test_errors_and_defaults(devices, tmp_path):
    model, places = model_and_places(devices[:2])
    trainer, count = pipelined(transformers.Trainer), len(devices)
    # Two micro-batches for each of the devices, which are all.
    assert Spread(copy.deepcopy(model), Options(None, None, None)).chunks == 2 * count
    with pytest.raises(ValueError, match=rf"\(devices: {count + 1}, accelerators: {count}\)"):
        trainer(model, adam(tmp_path), devices=count + 1)
    with pytest.raises(ValueError, match=r"not wrapped yet .*; pass them to MappedGPipe"):
        trainer(MappedGPipe(model, places), adam(tmp_path), devices=2)
