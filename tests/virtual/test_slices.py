"""Slices of a sequence are its micro-batches: what they compute is what the whole sequence does."""

import copy
import gc

import pytest
import torch
from torch import nn

from tests.support.architectures import DEEP, GPT, GROUPED, SIZES, module, spread
from tests.support.helpers import MODES, assert_no_races
from tests.support.size import rotated, soak, some
from tests.virtual.test_joined_steps import busiest
from torchgpipe import MappedGPipe, Offload, trace
from torchgpipe.mapped.slice_cache import Past
from torchgpipe.testing import observe

transformers = module()

LENGTH = 20
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "experts_implementation": "eager"}
#: By the class of a model: the sizes of its configuration.
MODELS = {
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": {**GROUPED, "sliding_window": 6},
    "BloomForCausalLM": {"vocab_size": 32, "hidden_size": 16, "n_layer": 3, "n_head": 2},
    "MixtralForCausalLM": {**EXPERTS, "num_local_experts": 3},
}
#: The same, for a soak.
MORE = {
    "Gemma3nForCausalLM": {
        **GROUPED,
        "num_hidden_layers": 5,
        "intermediate_size": [32] * 5,
        "activation_sparsity_pattern": [0.0] * 5,
        "head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "vocab_size_per_layer_input": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "sliding_window": 6,
    },
    "GPT2LMHeadModel": {**GPT, "n_positions": 32},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8, "sliding_window": 6},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 8, "sliding_window": 6},
    "Phi3ForCausalLM": {**DEEP, "pad_token_id": 0},
    "GPTNeoXForCausalLM": DEEP,
    "FalconForCausalLM": {**SIZES, "num_hidden_layers": 3, "alibi": True},
    "MptForCausalLM": {"vocab_size": 32, "d_model": 16, "n_heads": 2, "n_layers": 3},
    "OPTForCausalLM": {
        **SIZES,
        "ffn_dim": 32,
        "num_hidden_layers": 3,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 16,
    },
    "Olmo2ForCausalLM": GROUPED,
    "CohereForCausalLM": GROUPED,
    "GraniteForCausalLM": GROUPED,
    "Starcoder2ForCausalLM": GROUPED,
    "SmolLM3ForCausalLM": GROUPED,
    "CodeGenForCausalLM": {**GPT, "rotary_dim": 4},
    "Qwen3MoeForCausalLM": {**EXPERTS, "num_experts": 3, "moe_intermediate_size": 16},
    "GptOssForCausalLM": {**EXPERTS, "num_local_experts": 3, "head_dim": 8, "sliding_window": 6},
}
PLACES = [2, 4]
SLICES = [2, 5, 8, "auto"]
KEPT = [*MODES, "offload", Offload(share=0.5)]


def made(name="LlamaForCausalLM", **options):
    """A causal model without dropout."""
    kind = getattr(transformers, name)
    config = kind.config_class(**{**{**MODELS, **MORE}[name], **options})
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return kind(config).train()


def rows(count=2):
    """Rows of several lengths, padded on the right, with a prompt that counts for nothing."""
    ids = torch.randint(1, 32, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, 15:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def results(model, batch, chunks):
    """Losses, logits and gradients of a model, micro-batch by micro-batch."""
    parts = [dict(zip(batch, x)) for x in zip(*[x.chunk(chunks) for x in batch.values()])]
    outputs = [model(**part, use_cache=False) for part in parts]
    losses = torch.stack([x.loss for x in outputs])
    losses.mean().backward()
    logits = torch.cat([x.logits for x in outputs]).detach()
    return losses.detach(), logits, gradients(model)


def gradients(model):
    found = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return found


def same(model, pipe, batch, chunks, steps=2):
    """Check that steps of a wrapper are those of the model, without a race."""
    losses, logits, grads = results(model, batch, chunks)
    for _ in range(steps):
        with observe() as seen:
            output = pipe(**batch)
            output.loss.mean().backward()
        assert_no_races(seen)
        torch.testing.assert_close(output.loss.cpu().view(-1), losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradients(pipe.module), grads, rtol=1e-3, atol=1e-5)
        kept = batch["attention_mask"].bool()
        torch.testing.assert_close(output.logits.cpu()[kept], logits[kept], rtol=1e-3, atol=1e-4)


# What Gemma 3n's layers share outlives its step where it is kept for a recomputation.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "number"), [(x, k) for k, x in enumerate(some([*MODELS, *MORE], MODELS))]
)
def test_what_slices_compute(name, number, devices):
    settings = rotated(PLACES, SLICES, [1, 2], KEPT)
    for count, slices, chunks, mode in some(settings, settings[number::12]):
        model = made(name)
        wrapped = copy.deepcopy(model)
        pipe = MappedGPipe(
            wrapped, spread(wrapped, devices[:count]), chunks=chunks, slices=slices, checkpoint=mode
        )
        same(model, pipe, rows(), chunks)


def test_one_sequence_fills_all_devices(devices):
    model = made(num_hidden_layers=8)
    places = {**spread(model, devices[:4]), "lm_head": devices[3], "model.norm": devices[3]}
    ids = rows(1)["input_ids"]
    pipe = MappedGPipe(model, places, slices=8, checkpoint="never")
    pipe(input_ids=ids, labels=ids).loss.backward()
    for slices, most in ((8, 1.4), (4, 1.75), (1, 3.9)):
        pipe.slices = slices
        with observe(costs={"mm": 1.0, "addmm": 1.0, "bmm": 0.0}) as seen:
            pipe(input_ids=ids, labels=ids).loss.backward()
        assert seen.makespan / busiest(seen) < most


def test_cells_are_named_by_micro_batch_and_slice(devices):
    """The tokens of the proof are no step of a trace."""
    pipe = MappedGPipe(made(), spread(made(), devices[:2]), slices=[8, 7, 5], chunks=2)
    assert "slices=(8, 7, 5)" in repr(pipe)
    assert "slices: 3" in str(pipe.describe())
    with trace(pipe) as timeline:
        for _ in range(2):
            pipe(**rows()).loss.sum().backward()
    cells = [f"{i}.{k}" for i in range(2) for k in range(3)]
    named = {f"{stage}{kind}{x}" for stage in range(2) for kind in "FB" for x in cells}
    computed = [x for x in timeline.spans if x.computes]
    assert {x.name for x in computed if x.kind in "FB"} == named
    assert {x.step for x in computed} == {0, 1}
    assert "slices: 3 (8, 7, 5 tokens)" in str(pipe.describe())
    with observe(costs={"mm": 1.0}) as seen:
        pipe(**rows()).loss.sum().backward()
    assert {x.name for x in seen.timeline.spans if x.kind == "B"} == {x for x in named if "B" in x}
    pipe.slices = 1
    assert "slices" not in repr(pipe)
    assert "slices" not in str(pipe.describe())


def test_errors_name_the_slice(devices):
    model = made()
    pipe = MappedGPipe(model, spread(model, devices[:2]), slices=2)
    pipe(**rows())
    calls = iter([0, 1])
    model.lm_head.register_forward_pre_hook(lambda *_: [1 / (1 - next(calls))].clear())
    with pytest.raises(ZeroDivisionError) as raised:
        pipe(**rows())
    assert "micro-batch 0.1" in raised.value.__notes__[0]


def test_the_loss_of_the_caller(devices):
    """Logits are joined along the sequence, and nothing is kept of a loss without backward."""
    model = made()
    pipe = MappedGPipe(copy.deepcopy(model), spread(model, devices[:2]), slices=5)
    batch = rows()
    labels = batch.pop("labels")
    expected = nn.functional.cross_entropy(
        model(**batch, use_cache=False).logits.flatten(0, 1), labels.flatten()
    )
    expected.backward()
    output = pipe(**batch)
    assert set(output) == {"logits"}
    loss = nn.functional.cross_entropy(output.logits.cpu().flatten(0, 1), labels.flatten())
    loss.backward()
    torch.testing.assert_close(gradients(pipe.module), gradients(model), rtol=1e-3, atol=1e-5)
    pipe(**batch)
    gc.collect()
    assert not any(isinstance(x, Past) for x in gc.get_objects())


def test_losses_of_experts_are_means_of_slices(devices):
    model = made("MixtralForCausalLM", output_router_logits=True, router_aux_loss_coef=0.5)
    pipe = MappedGPipe(copy.deepcopy(model), spread(model, devices[:2]), slices=2)
    batch = {**rows(1), "attention_mask": torch.ones(1, LENGTH)}
    output, expected = pipe(**batch), model(**batch, use_cache=False)
    plain = expected.loss - 0.5 * expected.aux_loss
    torch.testing.assert_close(output.loss.cpu(), plain + 0.5 * output.aux_loss.cpu())
    assert 0.5 < output.aux_loss / expected.aux_loss < 2
    assert [x.shape for x in output.router_logits] == [x.shape for x in expected.router_logits]
    with pytest.raises(ValueError, match="balance of experts counts tokens"):
        pipe(**rows())


def test_evaluation(devices):
    model, batch = made(), rows()
    pipe = MappedGPipe(copy.deepcopy(model), spread(model, devices[:2]), slices=3).eval()
    with torch.no_grad():
        expected, output = model.eval()(**batch, use_cache=False), pipe(**batch)
    torch.testing.assert_close(output.loss.cpu(), expected.loss[None])
    assert output.logits.shape == expected.logits.shape


class Detached(nn.Module):
    """Attention that forgets how its keys came to be."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, *args, **kwargs):
        cache = kwargs["past_key_values"]
        if cache is not None:
            update = cache.update
            cache.update = lambda keys, values, *rest: update(keys.detach(), values, *rest)
        return self.own(*args, **kwargs)


def test_a_model_that_detaches_its_keys(devices):
    model = made()
    for layer in model.model.layers:
        layer.self_attn = Detached(layer.self_attn)
    pipe = MappedGPipe(model, spread(model, devices[:2]), slices=2)
    with pytest.raises(ValueError, match=r"gradients of the whole sequence.*off by"):
        pipe(**rows())


def kept(model):
    model.activation_checkpointing_enable()


def recurrent(model):
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=32, hidden_size=16, state_size=4, num_hidden_layers=2)
    )


def hybrid(model):
    layers = ["mamba", "hybrid"]
    return transformers.Zamba2ForCausalLM(
        transformers.Zamba2Config(**SIZES, num_hidden_layers=2, layer_types=layers)
    )


def replaced(model):
    """Give a model another forward, as trainers of distillation do."""
    plain = model.forward

    def forward(*args, **kwargs):
        return plain(*args, **kwargs)

    model.forward = forward


@pytest.mark.parametrize(
    ("change", "given", "message"),
    [
        (kept, {}, "gradient checkpoints of Transformers drop the cache"),
        (recurrent, {}, "causal models of Transformers, which take a cache"),
        (lambda _: nn.Linear(2, 2), {}, "missing a required argument|causal models"),
        (None, {"attention_mask": 1 - torch.eye(2, LENGTH)}, r"begin with padding: \[0\].*GRPO"),
        (None, {"logits_to_keep": 4}, "counts tokens from the end"),
        (replaced, {}, "replaced by another .* forward: replaced.<locals>.forward"),
        (None, {"use_cache": True}, "gets its cache from the wrapper"),
        (None, {"input_ids": None}, "divide the sequence that a model is called with by name"),
    ],
)
def test_refused(change, given, message, devices):
    model = made()
    model = (change and change(model)) or model
    pipe = MappedGPipe(model.train(), {"": devices[0]}, slices=2)
    with pytest.raises((ValueError, TypeError), match=message):
        pipe(**{**rows(), **given})


def test_refused_settings(devices):
    model = made()
    for slices, kind in ((0, ValueError), (True, ValueError), ("all", TypeError), ([], TypeError)):
        with pytest.raises(kind, match="slices"):
            MappedGPipe(model, {"": devices[0]}, slices=slices)
    pipe = MappedGPipe(model, {"": devices[0]}, slices=[4, 5])
    with pytest.raises(ValueError, match=r"slices: \[4, 5\], sum: 9, sequence: 20"):
        pipe(**rows())
    pipe = MappedGPipe(model, {"": devices[0]}, slices=2, threads=2)
    with pytest.raises(ValueError, match="one thread computes them"):
        pipe(**rows())


def of_trainer(kind, model, folder, **own):
    """The losses of three steps of a Trainer, and the weights after them."""
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    options |= {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant"}
    arguments = transformers.TrainingArguments(
        str(folder),
        **options,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
    )
    data = [{key: x[0] for key, x in rows(1).items()} for _ in range(4)]
    data += [{key: x[1] for key, x in rows(2).items()} for _ in range(8)]
    trainer = kind(model=model, args=arguments, train_dataset=data, **own)
    trainer.remove_callback(transformers.PrinterCallback)
    with observe() as seen:
        trainer.train()
    assert_no_races(seen)
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    return losses, {name: x.detach().cpu() for name, x in model.named_parameters()}


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=soak)])
def test_trainer(adapted, devices, tmp_path):
    pipelined = pytest.importorskip("torchgpipe.transformers").pipelined
    model = made()
    if adapted:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)
        )
    plain = copy.deepcopy(model)
    expected = of_trainer(transformers.Trainer, plain, tmp_path / "plain")
    own = MappedGPipe(model, spread(model, devices[:2]), chunks=2, slices=3)
    found = of_trainer(
        lambda model, **given: pipelined(transformers.Trainer)(model=own, **given),
        model,
        tmp_path / "own",
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
