"""TRL's trainers over several devices, of which they know the first: as the plain ones on it."""

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import GROUPED
from tests.support.helpers import assert_no_races
from tests.support.size import soak
from tests.support.trainers import known
from torchgpipe.testing import observe

transformers = pytest.importorskip("transformers", exc_type=MISSING)
trl = pytest.importorskip("trl", exc_type=MISSING)
peft = pytest.importorskip("peft", exc_type=MISSING)
datasets = pytest.importorskip("datasets", exc_type=MISSING)

# Not before it is known that these are there.
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl.trainer import utils  # noqa: E402
from trl.trainer.utils import add_fused_lm_head  # noqa: E402

from tests.virtual.test_joined_steps import busiest  # noqa: E402
from torchgpipe.transformers import pipelined  # noqa: E402
from torchgpipe.transformers.spread import Options, Spread  # noqa: E402

# TRL passes arguments that Transformers calls old.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:trl")

datasets.disable_progress_bars()
SIZE = 64


def tokenizer(side="right"):
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(SIZE)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, padding_side=side, **special
    )


def text(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{k}" for k in torch.randint(4, SIZE, (count,), generator=generator).tolist())


def model_of(kind="LlamaForCausalLM", seed=0, **options):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            **GROUPED,
            "vocab_size": SIZE,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **options,
        }
    )
    return getattr(transformers, kind)(config)


PAIRS = [
    {
        "prompt": text(3 + k % 3, k) + " ",
        "chosen": text(4 + k % 4, 20 + k),
        "rejected": text(3 + (k + 2) % 5, 40 + k),
    }
    for k in range(16)
]
TEXTS = [{"text": text(4 + 3 * (k % 5), k)} for k in range(32)]
PROMPTS = [{"prompt": text(3 + k % 3, k)} for k in range(32)]
JUDGED = [
    {"prompt": x["prompt"], "completion": x["chosen"], "label": k % 2 == 0}
    for k, x in enumerate(PAIRS)
]


def reward(completions, **_):
    return [sum(int(word[1:]) % 5 for word in x.split()) / 10 for x in completions]


ONLINE = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8}


def lora():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False)


def reference():
    return model_of(seed=7)


#: By name: the trainer, its options, its data, and what else it gets.
CASES = {
    "SFT, packed": (
        "SFT",
        {"packing": True, "max_length": 24, "per_device_train_batch_size": 2},
        TEXTS,
        {},
    ),
    "DPO": ("DPO", {}, PAIRS, {"ref_model": reference}),
    # The mini-batch has fewer answers of the reference than rows.
    "DPO, precomputed": ("DPO", {"precompute_ref_log_probs": True}, PAIRS, {"peft_config": lora}),
    "KTO": ("KTO", {}, JUDGED, {"peft_config": lora}),
    "Reward": ("Reward", {}, PAIRS, {}),
    "GRPO, two iterations": ("GRPO", {**ONLINE, "num_iterations": 2}, PROMPTS, {}),
    "RLOO": ("RLOO", {**ONLINE, "beta": 0.1}, PROMPTS, {"peft_config": lora}),
    "Distillation": (
        "Distillation",
        {"max_completion_length": 6, "per_device_train_batch_size": 8},
        PROMPTS,
        {"teacher_model": reference},
    ),
}

#: Others of the same kinds.
MORE = {
    "SFT": ("SFT", {"gradient_accumulation_steps": 2}, TEXTS, {}),
    "DPO, LoRA": ("DPO", {}, PAIRS, {"peft_config": lora}),
    "GRPO": ("GRPO", ONLINE, PROMPTS, {}),
    "GRPO, KL": ("GRPO", {**ONLINE, "beta": 0.1}, PROMPTS, {}),
    "SFT, LoRA": ("SFT", {}, TEXTS, {"peft_config": lora}),
    "SFT, half precision": ("SFT", {"bf16": True}, TEXTS, {"peft_config": lora}),
    "DPO, synchronised": (
        "DPO",
        {"sync_ref_model": True, "ref_model_sync_steps": 1},
        PAIRS,
        {"ref_model": reference},
    ),
    "KTO, reference": ("KTO", {}, JUDGED, {"ref_model": reference}),
    "GRPO, KL, LoRA": ("GRPO", {**ONLINE, "beta": 0.1}, PROMPTS, {"peft_config": lora}),
    "GRPO, accumulated": ("GRPO", {**ONLINE, "gradient_accumulation_steps": 2}, PROMPTS, {}),
}


def run(name, folder, device, monkeypatch, **own):
    """Train, and return what was logged and the weights."""
    kind, options, data, others = {**CASES, **MORE}[name]
    trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    if own:
        trainer = pipelined(trainer)
    if kind == "Reward":
        model = model_of("LlamaForSequenceClassification", num_labels=1)
    else:
        model = model_of()
    if "KL" in name and "LoRA" not in name:
        # The reference is loaded from here.
        model.save_pretrained(folder / "model")
        model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    given = {key: make() for key, make in others.items()}
    if kind in ("GRPO", "RLOO"):
        given["reward_funcs"] = reward
    arguments = config(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "max_steps": 3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "bf16": False,
            "learning_rate": 0.1,
            "optim": "sgd",
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            **options,
        },
    )
    known(monkeypatch, arguments, device)
    side = "left" if kind in ("GRPO", "RLOO", "Distillation") else "right"
    made = trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer(side),
        **given,
        **own,
    )
    made.remove_callback(transformers.PrinterCallback)
    assert made.accelerator.device == device
    with observe() as seen:
        made.train()
    logs = [
        {k: x[k] for k in x if k.startswith(("loss", "reward", "grad", "kl", "entropy", "logps"))}
        for x in made.state.log_history
        if "loss" in x
    ]
    weights = {key: x.detach().cpu().clone() for key, x in made.model.named_parameters()}
    return logs, weights, seen, made


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(x, marks=soak) for x in MORE)])
def test_logs_and_weights(name, devices, tmp_path, monkeypatch):
    expected, plain, _, _ = run(name, tmp_path, devices[0], monkeypatch)
    several = {"devices": devices[:3], "chunks": 4}
    logs, weights, seen, made = run(name, tmp_path, devices[0], monkeypatch, **several)
    assert len({*made.pipe.device_map.values()}) == 3
    torch.testing.assert_close(logs, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(weights, plain, rtol=1e-3, atol=1e-4)
    assert_no_races(seen)


@pytest.mark.parametrize("tied", [False, True])
def test_fused_head(tied, devices, monkeypatch):
    """The head's own device computes it, while the host issues the next micro-batch."""
    model, places = model_of(num_hidden_layers=8, tie_word_embeddings=tied), devices[:4]
    add_fused_lm_head(model)
    seen_on = []
    # As on GPUs, where only the labels that count are looked at.
    monkeypatch.setattr(utils, "_use_triton", lambda device: seen_on.append(device) or True)
    spread = Spread(model, Options(places, 8, "never"))
    inputs = torch.randint(4, SIZE, (8, 6)).to(places[0])
    pipe = spread.made()
    for _ in range(2):
        # One thread runs the first step, in which rows are watched.
        with observe(costs={"mm": 1.0, "addmm": 1.0, "bmm": 0.0}) as seen:
            output = pipe(input_ids=inputs, labels=inputs, fused_lm_head=True)
            output.loss.mean().backward()
    assert {*seen_on} == {places[3]}
    assert seen.makespan / busiest(seen) < 1.5
    assert_no_races(seen)
