"""Layers of a model compute what the model computes, in its own code."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tests.examples import MISSING
from torchgpipe import GPipe, ScheduledLoss

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import layers_of  # noqa: E402

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "Mistral": {"sliding_window": 4},
    # Scales what the embedding returns, caps its logits, has two kinds of layers, and is tied.
    "Gemma2": {"head_dim": 8, "sliding_window": 4},
}


def model_of(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS.get(name, {}), **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def causal_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batch():
    ids, mask = torch.randint(3, 40, (4, 9)), torch.ones(4, 9, dtype=torch.long)
    mask[1, 6:], mask[2, :3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def assert_same_gradients(model, plain):
    for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, msg=name, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name):
    model = model_of(name)
    plain, inputs = copy.deepcopy(model), batch()
    layers = layers_of(model)
    assert [*layers._modules] == [
        "embed_tokens",
        *(f"layers_{k}" for k in range(4)),
        "norm",
        "lm_head",
    ]
    expected = plain(**inputs).logits
    pipe = GPipe(layers, [3, 4], devices=["cpu", "cpu"], chunks=2)
    found = pipe(inputs)
    torch.testing.assert_close(found, expected)
    for logits in (found, expected):
        causal_loss(logits, inputs["input_ids"]).backward()
    assert_same_gradients(model, plain)
    # The parameters are the model's own.
    torch.testing.assert_close(pipe(inputs["input_ids"]), model(inputs["input_ids"]).logits)


def test_schedules():
    model = model_of("Llama")
    plain, inputs = copy.deepcopy(model), batch()
    pipe = GPipe(layers_of(model), [3, 4], devices=["cpu", "cpu"], chunks=2)
    step = ScheduledLoss(pipe, causal_loss, schedule="1f1b")
    step(inputs, inputs["input_ids"]).backward()
    causal_loss(plain(**inputs).logits, inputs["input_ids"]).backward()
    assert_same_gradients(model, plain)


def test_a_model_without_a_head():
    model, inputs = model_of("Llama").model, batch()
    found = layers_of(model)(inputs)
    torch.testing.assert_close(found["inputs_embeds"], model(**inputs).last_hidden_state)


class Reversed(transformers.LlamaModel):
    """A model that computes its layers in another order than its plan says."""

    def forward(self, *args, **kwargs):
        layers = self._modules["layers"]
        self._modules["layers"] = torch.nn.ModuleList(reversed(layers))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._modules["layers"] = layers


class Dropping(transformers.LlamaModel):
    """A model that drops some of what its embedding returns, in training."""

    def forward(self, *args, inputs_embeds=None, **kwargs):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(kwargs.pop("input_ids"))
        inputs_embeds = F.dropout(inputs_embeds, 0.5, self.training)
        return super().forward(*args, inputs_embeds=inputs_embeds, **kwargs)


def other(kind):
    model = model_of("Llama").eval()
    model.model.__class__ = kind
    return model


REFUSED = {
    "order": (lambda: other(Reversed), "computes something else"),
    "dropout": (lambda: other(Dropping), "changes what the embedding returns"),
    "scaled": (lambda: model_of("Granite", embedding_multiplier=3.0), "changes what the embedding"),
    "experts": (lambda: model_of("Mixtral", num_local_experts=2), "head needs more than"),
    "no plan": (
        lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=12)),
        r"must have a plan .*; use MappedGPipe",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name):
    make, text = REFUSED[name]
    model = make()
    modes = [x.training for x in model.modules()]
    with pytest.raises(ValueError, match=text):
        layers_of(model)
    assert [x.training for x in model.modules()] == modes
