"""Options of a Trainer that have it look at more than a loss, or count labels otherwise."""

import copy
import logging
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.examples import MISSING
from tests.support.once import Centre
from tests.unit.transformers.test_trainer import assert_same_weights, made, model_of, rows, wrapped

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
import torchgpipe  # noqa: E402
from torchgpipe.transformers import PipelineCallback, pipelined  # noqa: E402
from torchgpipe.transformers.idleness import Idleness  # noqa: E402


def packed(batch):
    """Two texts in each row, which positions tell apart."""
    found = {key: torch.stack([x[key] for x in batch]) for key in ("input_ids", "labels")}
    count = len(batch) // 2
    found = {key: x[: 2 * count].reshape(count, -1) for key, x in found.items()}
    return {**found, "position_ids": torch.arange(6).repeat(2).expand(count, -1).contiguous()}


def own_loss(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


class WithPenalty(transformers.Trainer):
    """Add something of the logits to the model's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        out = model(**inputs)
        with torch.no_grad():
            # As trainers of TRL have it, for what they log.
            self.right = (out.logits.argmax(-1) == inputs["labels"]).sum()
        loss = out.loss + out.logits.square().mean()
        return (loss, out) if return_outputs else loss


def metrics(seen):
    found = {"mean": float(np.mean(seen.predictions[0] if seen.losses is None else seen.losses))}
    return found if seen.inputs is None else {**found, "inputs": int(np.sum(seen.inputs))}


OPTIONS = {
    # The last step of an epoch has fewer mini-batches, and the last of these fewer rows.
    "ragged": ({"gradient_accumulation_steps": 3, "num_train_epochs": 2, "max_steps": -1}, {}),
    "own loss": ({"gradient_accumulation_steps": 2}, {"compute_loss_func": own_loss}),
    "losses": ({"include_for_metrics": ["loss", "inputs"]}, {"compute_metrics": metrics}),
    "parts": (
        {"eval_accumulation_steps": 1},
        {
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            "compute_metrics": metrics,
        },
    ),
    "packed": ({"max_grad_norm": 0.1}, {"data_collator": packed}),
    "penalty": ({}, {}),
}


# The last mini-batch of packed rows is one of three examples, which are packed in pairs.
@pytest.mark.filterwarnings("ignore:a data collator whose mini-batches cannot be cut")
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, tmp_path):
    arguments, given = OPTIONS[name]
    data, model = rows(15), model_of("llama")
    kind = WithPenalty if name == "penalty" else transformers.Trainer
    found = []
    for make, one in ((kind, copy.deepcopy(model)), (pipelined(kind), wrapped(model))):
        trainer = made(make, one, tmp_path, data, given=given, **arguments)
        trainer.train()
        steps = [(x["loss"], x["grad_norm"]) for x in trainer.state.log_history if "loss" in x]
        seen = trainer.evaluate()
        found.append(
            (steps, {k: x for k, x in seen.items() if "_per_" not in k and "time" not in k})
        )
        if make is kind:
            plain = trainer.model
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert_same_weights(model, plain)


class Inherited(pipelined(transformers.Trainer)):
    """A class of a user's own."""


@pytest.mark.parametrize(
    "kind", [pipelined(transformers.Trainer), pipelined(WithPenalty), Inherited]
)
def test_classes_are_pickled(kind):
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_class_with_a_class_of_its_own():
    class Meta(type):
        pass

    class Other(transformers.Trainer, metaclass=Meta):
        pass

    found = pipelined(Other)
    assert isinstance(found, Meta)
    assert issubclass(found, Other)


def test_a_trainer_as_it_is(tmp_path):
    with pytest.raises(RuntimeError, match=r"use the class .*pipelined\(Trainer\)"):
        made(transformers.Trainer, wrapped(model_of("llama")), tmp_path, rows()).train()
    # It computes a loss from what the wrapper returns.
    given = {"compute_loss_func": own_loss}
    made(transformers.Trainer, wrapped(model_of("llama")), tmp_path, rows(), given=given).train()


class Centred(nn.Module):
    """A model whose layer has state of the mini-batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.centre, self.head = nn.Embedding(32, 4), Centre(4), nn.Linear(4, 32)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.centre(self.embed(input_ids)[:, 0]))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_state_of_the_mini_batch_is_that_of_a_trainers(tmp_path):
    torch.manual_seed(0)
    model = Centred()
    plain = copy.deepcopy(model)
    data = [{"input_ids": x["input_ids"], "labels": x["input_ids"][0]} for x in rows()]
    for make, one in ((transformers.Trainer, plain), (pipelined(transformers.Trainer), model)):
        given = wrapped(model) if one is model else one
        options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
        made(make, given, tmp_path, data, **options).train()
    assert plain.centre.centre.abs().sum() > 0
    torch.testing.assert_close(model.centre.centre, plain.centre.centre)
    assert_same_weights(model, plain)


class OneBatch(transformers.Trainer):
    """The same mini-batch again and again."""

    def get_train_dataloader(self):
        return [next(iter(super().get_train_dataloader()))] * 12


class InTwoWays(transformers.Trainer):
    """A loss whose calls differ from mini-batch to mini-batch, with a state within a dict."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        vars(self).setdefault("kept", {"number": 0})["number"] += 1
        number, ids = self.kept["number"], inputs.pop("input_ids")
        if number % 3 == 0:
            output = model(ids, None, **inputs)
        else:
            output = model(ids, **inputs) if number % 3 == 1 else model(input_ids=ids, **inputs)
        assert number == self.kept["number"]
        return output.loss * number


@pytest.mark.parametrize("kind", [OneBatch, InTwoWays])
def test_mini_batches_that_are_joined(kind, tmp_path):
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    model = model_of("llama")
    plain = copy.deepcopy(model)
    for make, one in ((kind, plain), (pipelined(kind), wrapped(model))):
        made(make, one, tmp_path, rows(), **options).train()
    assert_same_weights(model, plain)


def test_a_step_is_traced(tmp_path, monkeypatch):
    """A callback shows one step of a training, also of a model that the Trainer spreads itself."""
    said = []
    monkeypatch.setattr(logging.getLogger("torchgpipe"), "warning", said.append)
    look = PipelineCallback(trace=2)
    assert look.timeline is None
    given = {"devices": ["cpu", "cpu"], "chunks": 4, "callbacks": [look]}
    model = model_of("llama")
    trainer = made(pipelined(transformers.Trainer), model, tmp_path, rows(12), given=given)
    trainer.train()
    assert trainer.state.global_step > 2
    # The first line is of the first step.
    assert said[1:] == [f"optimizer step 2:\n{look.timeline}"]
    cells = {(x.kind, x.microbatch) for x in look.timeline.step().spans if x.kind in "FB"}
    assert cells == {(kind, k) for kind in "FB" for k in range(4)}
    # Nothing is traced any more.
    with torchgpipe.trace(trainer.pipe):
        pass


@pytest.mark.parametrize("step", [0, 1, "2"])
def test_the_first_step_is_not_traced(step):
    with pytest.raises(ValueError, match=r"\(trace: .+\); the first step spreads the model"):
        PipelineCallback(trace=step)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([[2]], "2 devices, 1 micro-batch of 2 rows: bubble 50%"),
        ([[1, 1, 1]], "2 devices, 3 micro-batches of 1 row: bubble 25%"),
        ([[1, 1], [1]], "2 devices, 3 micro-batches of 1 row, in 2 groups: bubble 40%"),
    ],
)
def test_the_figures_of_a_step_are_those_of_all_groups(groups, expected):
    figures = Idleness([torch.device("cpu"), torch.device("meta")], groups)
    assert figures.line() == expected


def test_a_step_of_several_groups_is_said(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(logging.getLogger("torchgpipe"), "warning", said.append)
    given = {"devices": ["cpu", "cpu"], "chunks": 4, "joined": 1}
    trainer = made(
        *(pipelined(transformers.Trainer), model_of("llama"), tmp_path, rows(12)),
        given=given,
        gradient_accumulation_steps=2,
    )
    trainer.train()
    assert "in 2 groups" in said[0]
