"""Architectures of Hugging Face's Transformers, tiny and without dropout, and maps for them."""

import functools

import pytest
import torch
from torch import nn

#: Sizes that most configurations name alike.
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2}
DEEP = {**SIZES, "intermediate_size": 32, "num_hidden_layers": 3}
GROUPED = {**DEEP, "num_key_value_heads": 1, "pad_token_id": 0}
GPT = {"vocab_size": 32, "n_embd": 16, "n_layer": 3, "n_head": 2}
PAIR = {
    "vocab_size": 32,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_labels": 3}
VISION |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}

#: By name, the class of the model, that of its configuration, and the sizes there.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 32,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 3,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", DEEP),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, **EXPERTS, "num_local_experts": 3},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT, "n_positions": 32}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {**PAIR, "max_position_embeddings": 32, "forced_eos_token_id": 2},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 32,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", DEEP),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 4}),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            **SIZES,
            "ffn_dim": 32,
            "num_hidden_layers": 3,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **GROUPED,
            **EXPERTS,
            "num_experts": 3,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", DEEP),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**DEEP, "pad_token_id": 0}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SIZES, "num_hidden_layers": 3}),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 32, "hidden_size": 16, "n_layer": 3, "n_head": 2},
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", GROUPED),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", GROUPED),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", "GPTBigCodeConfig", {**GPT, "n_positions": 32}),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 32, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 3},
    ),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**DEEP, "max_position_embeddings": 64}),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": 32, "dim": 16, "hidden_dim": 32, "n_layers": 3, "n_heads": 2},
    ),
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**DEEP, "embedding_size": 8, "num_hidden_groups": 3},
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**DEEP, "embedding_size": 8}),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**DEEP, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **PAIR,
            "num_mel_bins": 4,
            "max_source_positions": 8,
            "max_target_positions": 16,
        },
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [1, 1, 2],
            "num_heads": [1, 2, 2],
            "window_size": 2,
            "num_labels": 3,
        },
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 16], "depths": [1, 1, 2], "num_stages": 3, "num_labels": 3},
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16, 16],
            "depths": [1, 1, 1],
            "layer_type": "basic",
            "num_labels": 3,
        },
    ),
}


@functools.cache
def module():
    """Hugging Face's Transformers, without its warnings."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.set_verbosity_error()
    return transformers


def build(name):
    """A model in training, without dropout, and what it is called with: four rows."""
    kind, config, sizes = ARCHITECTURES[name]
    transformers = module()
    found = getattr(transformers, config)(**sizes)
    found.use_cache = False
    for key, value in vars(found).items():
        if "drop" in key and isinstance(value, float):
            setattr(found, key, 0.0)
    torch.manual_seed(0)
    model = getattr(transformers, kind)(found).train()
    torch.manual_seed(1)
    labels = torch.randint(1, 32, (4, 6))
    if "Image" in kind:
        size = sizes.get("image_size", 32)
        images = torch.rand(4, 3, size, size)
        return model, {"pixel_values": images, "labels": torch.randint(0, 3, (4,))}
    if name == "whisper":
        return model, {"input_features": torch.rand(4, 4, 16), "labels": labels}
    mask = torch.ones(4, 6, dtype=torch.long)
    mask[0, 4:] = 0
    return model, {"input_ids": labels, "attention_mask": mask, "labels": labels}


def spread(model, devices):
    """A map that spreads each list of blocks over the devices, and keeps tied weights together."""
    found = {"": devices[0]}

    def add(prefix, module, last):
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(child, nn.ModuleList) and len(child) > 1:
                for k in range(len(child)):
                    found[f"{path}.{k}"] = devices[k * len(devices) // len(child)]
                last = True
            elif any(isinstance(x, nn.ModuleList) and len(x) > 1 for x in child.modules()):
                add(f"{path}.", child, False)
                last = True
            elif any(True for _ in child.parameters()):
                found[path] = devices[-1] if last else devices[0]

    add("", model, False)
    names = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor, []).append(name)
    for several in names.values():
        owners = [max((x for x in found if name.startswith(x)), key=len) for name in several]
        found.update(dict.fromkeys(filter(None, owners), found[owners[0]]))
    return found
