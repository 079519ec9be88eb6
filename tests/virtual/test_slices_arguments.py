"""The arguments and outputs of calls in slices, and models that cannot be computed so."""

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import spread
from tests.support.helpers import assert_no_races
from torchgpipe import Chunks, MappedGPipe, NoChunk
from torchgpipe.testing import observe

transformers = pytest.importorskip("transformers", exc_type=MISSING)

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "experts_implementation": "eager",
    "pad_token_id": 0,
}
SHARED = {
    "num_hidden_layers": 6,
    "intermediate_size": [64] * 6,
    "activation_sparsity_pattern": [0.0] * 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 5,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 4,
    "vocab_size_per_layer_input": 61,
}


def made(kind="Llama", dtype=torch.float64, **options):
    torch.manual_seed(0)
    name = kind if kind.endswith(("Head", "Model", "Classification")) else f"{kind}ForCausalLM"
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**SIZES, **options})).to(dtype).train()


def batch(rows=2, length=20):
    torch.manual_seed(1)
    ids = torch.randint(1, 61, (rows, length))
    return {"input_ids": ids, "labels": ids.clone()}


def gradients(model):
    found = {k: p.grad.cpu() for k, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(make, given, devices, **own):
    """Compare with the plain model, whose calls have the same arguments."""
    model = make()
    model(**{"use_cache": False, **given}).loss.backward()
    expected, model = gradients(model), make()
    pipe = MappedGPipe(model, spread(model, devices[:4]), **own)
    with observe() as seen:
        pipe(**given).loss.mean().backward()
    torch.testing.assert_close(gradients(model), expected, atol=1e-6, rtol=1e-4)
    assert_no_races(seen)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_shared_keys(checkpoint, devices):
    """Layers that have the keys of an earlier one, as those of Gemma 3n, keep nothing."""
    options = {"slices": 3, "checkpoint": checkpoint}
    assert_same(lambda: made("Gemma3n", **SHARED), batch(), devices, **options)


def test_use_cache_is_given(devices):
    """The argument that TRL's trainers give."""
    assert_same(made, {**batch(), "use_cache": False}, devices, slices=3)


def test_everything_is_divided(devices):
    """Mini-batches as a pipelined Trainer passes those that it joins."""
    model = made()
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=3)
    rows = [{**batch(1), "use_cache": False, "pixel_values": None} for _ in range(2)]
    found = pipe(**Chunks.of(rows))
    assert [x.logits.shape for x in found] == 2 * [(1, 20, 61)]


@pytest.mark.parametrize("rows", [1, 3])
def test_slices_of_one_token(rows, devices):
    assert_same(made, batch(rows, 6), devices, slices=6)


@pytest.mark.parametrize("rows", [1, 2])
def test_router_logits_are_joined(rows, devices):
    """Outputs of routers have rows and positions in one dimension, also if there is one row."""
    model = made("Mixtral", num_local_experts=4, output_router_logits=True)
    expected = model(**batch(rows), use_cache=False).router_logits
    out = MappedGPipe(model, spread(model, devices[:4]), slices=3)(**batch(rows))
    found = [x.cpu() for x in out.router_logits]
    torch.testing.assert_close(found, [*expected])


def test_tuples_without_a_cache(devices):
    model = made()
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=3)
    assert len(pipe(**batch(), return_dict=False)) == 2


def test_positions_of_several_kinds(devices):
    """Qwen 2 VL has three positions of each token, in front of the rows."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    positions = torch.arange(20).expand(3, 1, 20).clone()
    positions[1:] //= 2

    def make():
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
        config = transformers.Qwen2VLConfig(
            text_config={**SIZES, "rope_parameters": rope}, vision_config=vision
        )
        torch.manual_seed(0)
        return transformers.Qwen2VLForConditionalGeneration(config).double().train()

    model = make()
    given = batch(1)
    model(**given, position_ids=positions, use_cache=False).loss.backward()
    expected, model = gradients(model), make()
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=3)
    pipe(**given, position_ids=NoChunk(positions)).loss.mean().backward()
    torch.testing.assert_close(gradients(model), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_rows(rows, checkpoint, devices):
    """A text that begins where positions begin again sees nothing of the one before."""
    positions = torch.cat([torch.arange(7), torch.arange(9), torch.arange(4)]).repeat(rows, 1)
    given = {**batch(rows), "position_ids": positions}
    assert_same(made, given, devices, slices=[5, 5, 10], checkpoint=checkpoint)


@pytest.mark.parametrize("labels", ["labels", "shift_labels"])
def test_fused_heads(labels, devices):
    """A fused head of TRL has no output for the last token, whose label is in no row."""
    utilities = pytest.importorskip("trl.trainer.utils", exc_type=MISSING)
    models = made(), made()
    for model in models:
        utilities.add_fused_lm_head(model)
    given = {**batch(), "fused_lm_head": True}
    if labels == "shift_labels":
        given[labels] = given.pop("labels")
    expected = models[0](**given)
    expected.loss.backward()
    pipe = MappedGPipe(models[1], spread(models[1], devices[:4]), slices=3)
    found = pipe(**given)
    found.loss.mean().backward()
    torch.testing.assert_close(found.log_probs.cpu(), expected.log_probs)
    torch.testing.assert_close(gradients(models[1]), gradients(models[0]), atol=1e-6, rtol=1e-4)


class Shorter(torch.nn.Module):
    """A head with no output for the first token of what it is called with."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        return self.own(x[:, 1:])


def test_outputs_with_other_shapes(devices):
    model = made()
    model.lm_head = Shorter(model.lm_head)
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=2)
    with pytest.raises(ValueError, match="outputs of slices"):
        pipe(input_ids=batch(1)["input_ids"])


def causal(length=20):
    return torch.ones(length, length, dtype=torch.bool).tril()[None, None]


def prefix():
    mask = causal()
    mask[..., :15, :15] = True
    return mask


#: By name: the model, what else its call gets, and words of the error.
REFUSED = {
    "packed": (
        lambda: made("Mistral", sliding_window=5),
        {"position_ids": torch.arange(64)[None] % 40},
        "a row of several texts",
    ),
    "prefix": (made, {"attention_mask": prefix()}, "causal mask"),
    "window": (lambda: made("Mistral", sliding_window=5), {"attention_mask": causal()}, "window"),
    "masks": (made, {"attention_mask": {"full_attention": causal()}}, "mask of padding"),
    "pixels": (made, {"pixel_values": torch.zeros(1, 3, 8, 8)}, "slices are for text"),
    "class": (
        lambda: made("LlamaForSequenceClassification"),
        {"labels": torch.tensor([1])},
        "whole sequences",
    ),
    "one dimension": (made, {"input_ids": torch.ones(20).long(), "labels": None}, "rows and pos"),
    "empty": (made, {"input_ids": torch.ones(1, 0).long(), "labels": None}, "rows and pos"),
    # Their labels are those of the tokens themselves.
    "no shift": (lambda: made("Bart", d_model=32, dropout=0.0), {}, "must have the gradients"),
    # It has its cache in a way of its own.
    "own cache": (
        lambda: made(
            "XLMWithLMHeadModel", n_layers=2, n_heads=4, emb_dim=32, n_words=61, causal=True
        ),
        {"labels": None},
        "must take the keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, devices):
    make, others, words = REFUSED[name]
    length = max((x.shape[1] for k, x in others.items() if k == "position_ids"), default=20)
    model = make()
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=2)
    with pytest.raises(ValueError, match=words):
        pipe(**{**batch(1, length), **others})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("detached", [0, 1])
def test_the_proof_sees_a_cache_that_is_detached(detached, dtype, devices, monkeypatch):
    """The keys have a small share of the gradient."""
    from torchgpipe.mapped import slice_cache

    seen = slice_cache.Past.seen
    calls = iter(range(10**6))

    def cut(self, k, own):
        found = seen(self, k, own)
        if next(calls) % 2 != detached:
            return found
        size = own.shape[-2]
        return torch.cat([found[..., :-size, :].detach(), found[..., -size:, :]], -2)

    monkeypatch.setattr(slice_cache.Past, "seen", cut)
    model = made(dtype=dtype)
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=2)
    with pytest.raises(ValueError, match="must have the gradients"):
        pipe(**batch(1, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_proof_sees_a_model_that_looks_ahead(dtype, devices):
    model = made("BertLMHeadModel", dtype, hidden_dropout_prob=0.0)
    pipe = MappedGPipe(model, spread(model, devices[:4]), slices=2)
    with pytest.raises(ValueError, match="no token looks at later ones"):
        pipe(**batch(1, 40))
