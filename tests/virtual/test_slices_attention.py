"""Attention of slices without masks: what FlashAttention's operator computes is what masks do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from tests.support.architectures import module, spread
from tests.virtual.test_slices import made, rows, same
from torchgpipe import MappedGPipe
from torchgpipe.mapped.slice_attention import SliceMask

transformers = module()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (4, 4), (1, 7)])
def test_the_last_query_sees_all_keys(queries, keys, dtype, devices):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, queries, 8), *(torch.randn(2, 2, keys, 8) for _ in "kv")]
    mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    found = []
    for device in ("cpu", devices[0]):
        own = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs]
        if device == "cpu":
            output = scaled_dot_product_attention(*own, attn_mask=mask, enable_gqa=True)
        else:
            output = torch.ops.aten._scaled_dot_product_flash_attention(*own, is_causal=True)[0]
        output.sin().sum().backward()
        found.append([x.cpu() for x in (output.detach(), *(x.grad for x in own))])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_masks_are_made_where_no_kernel_is(has_kernel, checkpoint, devices, monkeypatch):
    made_masks = []
    own = SliceMask.on
    monkeypatch.setattr(SliceMask, "on", lambda *args: made_masks.append(0) or own(*args))
    monkeypatch.setattr(torch.backends.cuda, "flash_sdp_enabled", lambda: has_kernel)
    model = made()
    wrapped = copy.deepcopy(model)
    pipe = MappedGPipe(wrapped, spread(wrapped, devices[:2]), slices=4, checkpoint=checkpoint)
    batch = {**rows(1), "attention_mask": torch.ones(1, 20)}
    same(model, pipe, batch, 1)
    assert bool(made_masks) != has_kernel


@pytest.mark.parametrize("reason", ["padding", "features"])
def test_what_no_kernel_computes(reason, devices):
    """Padding, and features that are not in eights, have masks as ever."""
    model = made(**({"head_dim": 6} if reason == "features" else {}))
    wrapped = copy.deepcopy(model)
    pipe = MappedGPipe(wrapped, spread(wrapped, devices[:2]), slices=4)
    batch = rows(2)
    if reason != "padding":
        batch["attention_mask"] = torch.ones(2, 20)
    same(model, pipe, batch, 1)


def test_other_models_are_computed_as_ever():
    """Transformers' functions know a slice by its start, and all else is theirs."""
    MappedGPipe(made(), {"": "cpu"}, slices=2)(**rows(1))
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    plain = transformers.integrations.sdpa_attention.sdpa_attention_forward
    x = torch.randn(1, 2, 4, 8)
    expected = plain(nn.Module(), x, x, x, None)[0]
    assert attend(nn.Module(), x, x, x, None)[0].equal(expected)
    causal = transformers.masking_utils.causal_mask_function
    given = {"batch_size": 1, "q_length": 2, "kv_length": 6, "mask_function": causal}
    found = masks(**given, q_offset=4, kv_offset=0)
    assert found.equal(torch.ones(2, 6, dtype=torch.bool).tril(4)[None, None])
