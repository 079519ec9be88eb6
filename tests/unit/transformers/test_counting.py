"""Labels that count: losses over rows, pixels and patches, and in double precision."""

import pytest
import torch

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


def pixels():
    """Images with pixels that count nowhere, by a label that the configuration names."""
    sizes = {"hidden_sizes": [4, 8], "num_attention_heads": [1, 2], "sr_ratios": [1, 1]}
    layers = {"num_encoder_blocks": 2, "depths": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
    config = transformers.SegformerConfig(
        **sizes, **layers, mlp_ratios=[1, 1], decoder_hidden_size=4, num_labels=3
    )
    labels = torch.randint(3, (5, 8, 8))
    labels[:2, 1:] = config.semantic_loss_ignore_index
    return transformers.SegformerForSemanticSegmentation(config), {
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


def doubles():
    """Labels with shares that are no numbers of single precision."""
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=16))
    labels = torch.randint(32, (5, 7))
    labels[:2, 1:] = -100
    return model.double(), {"input_ids": torch.randint(32, (5, 7)), "labels": labels}


@pytest.mark.parametrize(
    "case", [lambda: speech("sum"), lambda: speech("mean"), pixels, patches, doubles], ids=range(5)
)
def test_losses(case, tmp_path):
    torch.manual_seed(0)
    model, batch = case()
    expected = model.eval()(**batch).loss.detach()
    own = made(pipelined(transformers.Trainer), wrapped(model, chunks=3), tmp_path, [])
    with torch.no_grad():
        found = own.compute_loss(model, dict(batch))
    torch.testing.assert_close(found, expected, rtol=1e-12 if case is doubles else 1e-5, atol=0)
