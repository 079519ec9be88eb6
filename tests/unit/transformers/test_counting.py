"""Labels that count: losses over rows, pixels and patches, and in double precision."""

import pytest
import torch
from torch import nn

from tests.examples import MISSING
from tests.unit.transformers.test_trainer import made, wrapped

transformers = pytest.importorskip("transformers", exc_type=MISSING)

# Not before it is known that Transformers is there.
from torchgpipe.transformers import pipelined  # noqa: E402


def speech(reduction):
    """Texts of unequal length, which have a loss each."""
    config = transformers.Wav2Vec2Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        conv_dim=(4,),
        conv_stride=(8,),
        conv_kernel=(10,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        ctc_loss_reduction=reduction,
    )
    labels = torch.randint(1, 8, (5, 4))
    labels[:2, 1:] = -100
    return transformers.Wav2Vec2ForCTC(config), {
        "input_values": torch.randn(5, 200),
        "labels": labels,
    }


def pixels(count):
    """Images with pixels of a label that the configuration names, which have no loss.

    Of the means of several labels they are no part, but of the mean of one.
    """
    sizes = {"hidden_sizes": [4, 8], "num_attention_heads": [1, 2], "sr_ratios": [1, 1]}
    layers = {"num_encoder_blocks": 2, "depths": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
    config = transformers.SegformerConfig(
        **sizes, **layers, mlp_ratios=[1, 1], decoder_hidden_size=4, num_labels=count
    )
    labels = torch.zeros(5, 8, 8, dtype=torch.long)
    labels += torch.arange(5)[:, None, None] % max(2, count)
    labels[:2, 1:] = config.semantic_loss_ignore_index
    model = transformers.SegformerForSemanticSegmentation(config)
    nn.init.normal_(model.decode_head.classifier.bias)  # Or all labels have the same loss.
    return model, {
        "pixel_values": torch.randn(5, 3, 8, 8),
        "labels": labels,
    }


def patches():
    """Images with masked patches, in each another number of them."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "image_size": 8}
    config = transformers.ViTConfig(**sizes, num_hidden_layers=1, patch_size=2, encoder_stride=2)
    return transformers.ViTForMaskedImageModeling(config), {
        "pixel_values": torch.randn(5, 3, 8, 8),
        "bool_masked_pos": torch.arange(16) < torch.tensor([[1], [2], [4], [8], [16]]),
    }


def painted():
    """Images whose labels are images, too, of which the masked patches have a loss."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "mlp_dim": 8, "decoder_hidden_size": 4}
    images = {"image_size": [8, 4], "patch_size": 2, "pretrain_image_size": 4}
    layers = {"num_hidden_layers": 2, "intermediate_hidden_state_indices": [0, 1], "merge_index": 0}
    config = transformers.SegGptConfig(**sizes, **images, **layers)
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks", "labels")
    return transformers.SegGptForImageSegmentation(config), {
        **{name: torch.randn(5, 3, 4, 4) for name in names},
        "bool_masked_pos": torch.arange(8) < torch.tensor([[1], [1], [2], [4], [8]]),
    }


def prompts(kind):
    """Texts that virtual tokens precede, so that the first label of a row counts, or does not."""
    peft = pytest.importorskip("peft", exc_type=MISSING)
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=16)
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    adapter = getattr(peft, kind)(num_virtual_tokens=2, task_type="CAUSAL_LM")
    ids = torch.randint(32, (5, 7))
    labels = ids.clone()
    labels[:2, 2:] = -100
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


class Losses(nn.Module):
    """A model without a configuration, and without parameters."""

    def forward(self, logits, labels):
        return transformers.utils.ModelOutput(loss=nn.functional.cross_entropy(logits, labels))


class LossesForCTC(Losses):
    """A model that is named as those of Transformers are."""


class Decisions(nn.Module):
    """A model whose labels are truth values."""

    def forward(self, logits, labels):
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        return transformers.utils.ModelOutput(loss=loss)


def own(kind):
    """Labels that count, in a model that is not of Transformers."""
    labels = torch.tensor([0, 1, 1, -100, -100])
    return kind(), {"logits": torch.rand(5, 2), "labels": labels}


def truths():
    """Labels that all count, be they true or not."""
    labels = torch.tensor([True, True, True, False, False])
    return Decisions(), {"logits": torch.rand(5), "labels": labels}


def doubles():
    """Labels with shares that are no numbers of single precision."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=16))
    labels = torch.randint(32, (5, 7))
    labels[:2, 1:] = -100
    return model.double(), {"input_ids": torch.randint(32, (5, 7)), "labels": labels}


CASES = {
    "sums over rows": lambda: speech("sum"),
    "means over rows": lambda: speech("mean"),
    "pixels": lambda: pixels(3),
    "pixels with one label": lambda: pixels(1),
    "patches": patches,
    "patches of labels": painted,
    "prompts": lambda: prompts("PromptTuningConfig"),
    "prefixes": lambda: prompts("PrefixTuningConfig"),
    "cartridges": lambda: prompts("CartridgeConfig"),
    "no parameters": lambda: own(Losses),
    "no configuration": lambda: own(LossesForCTC),
    "truth values": truths,
    "doubles": doubles,
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_losses(name, tmp_path):
    torch.manual_seed(0)
    model, batch = CASES[name]()
    expected = model.eval()(**batch).loss.detach()
    own = made(pipelined(transformers.Trainer), wrapped(model, chunks=3), tmp_path, [])
    with torch.no_grad():
        found = own.compute_loss(model, dict(batch))
    torch.testing.assert_close(found, expected, rtol=1e-12 if name == "doubles" else 1e-5, atol=0)
