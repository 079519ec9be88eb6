"""A wrapped model from the hub does what its users call: maps, checkpoints, text and adapters."""

import copy

import pytest
import torch
from torch import nn

from tests.behaviour.test_mapped_peft import IGNORED, START, adapted, names
from tests.support.architectures import build
from tests.support.helpers import assert_no_races
from tests.support.packed import PackedLinear
from tests.virtual.stages import ONE_MODE
from torchgpipe import GPipe, MappedGPipe
from torchgpipe.testing import observe

pytestmark = [
    IGNORED,
    # A head and an embedding on one device are two visits of it.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


def compare(pipe, plain, inputs):
    """Train a step, and compare it with the micro-batches one after another."""
    rows = [{key: x[k : k + 2] for key, x in inputs.items()} for k in (0, 2)]
    losses = torch.stack([plain(**row).loss for row in rows])
    losses.mean().backward()
    with observe() as seen:
        out = pipe(**inputs)
        out.loss.mean().backward()
    assert_no_races(seen)
    torch.testing.assert_close(out.loss.cpu(), losses)
    found = dict(pipe.named_parameters())
    for name, other in plain.named_parameters():
        assert (found[name].grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(found[name].grad.cpu(), other.grad)


@pytest.mark.parametrize("values", [(0, 1), ("virtual:0", "virtual:1")], ids=["numbers", "texts"])
@pytest.mark.parametrize("tied", [False, True])
def test_maps_with_the_head_beside_the_embedding(devices, tied, values):
    """A map as planners for two cards make it is taken as it is."""
    model, inputs = build("llama")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    plain = copy.deepcopy(model)
    first, second = values
    layers = {f"model.layers.{k}": second if k else first for k in range(3)}
    ends = {"model.embed_tokens": first, "model.rotary_emb": first, "lm_head": first}
    model.hf_device_map = {**ends, **layers, "model.norm": second}
    pipe = MappedGPipe(model, chunks=2, checkpoint="always")
    assert pipe.device_map["lm_head"] == devices[0]
    assert pipe.device_map["model.norm"] == devices[1]
    compare(pipe, plain, inputs)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("mode", ONE_MODE)
def test_checkpoints_of_the_model(devices, mode):
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, names(devices[:2]), chunks=2, checkpoint=mode)
    pipe.gradient_checkpointing_enable()
    pipe.enable_input_require_grads()
    compare(pipe, plain, inputs)


def test_text_between_steps(devices):
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, names(devices[:2]), chunks=2, checkpoint="always")
    prompt = {key: inputs[key][:2, :4] for key in ("input_ids", "attention_mask") if key in inputs}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = plain.eval().generate(**prompt, **options)
    for training in (True, False):
        found = pipe.train(training).generate(**prompt, **options)
        assert found.tolist() == expected.tolist()
    with torch.no_grad():
        logits = pipe(**inputs).logits
        torch.testing.assert_close(logits.cpu(), plain(**inputs).logits)
    pipe.train()
    compare(pipe, plain.train(), inputs)


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["adapters", "head too"])
def test_adapters_that_are_merged(devices, saved):
    """The model that comes back is the plain one on its devices, and the wrapper goes on."""
    model, inputs = adapted(saved=saved)
    plain = copy.deepcopy(model).eval().merge_and_unload()
    pipe = MappedGPipe(model, names(devices[:2]), chunks=2)
    pipe(**inputs).loss.mean().backward()
    merged = pipe.eval().merge_and_unload()
    assert type(merged) is type(plain)
    with torch.no_grad():
        expected = plain(**inputs).logits
        torch.testing.assert_close(merged(**inputs).logits.cpu(), expected)
        torch.testing.assert_close(pipe(**inputs).logits.cpu(), expected)
    state = merged.state_dict()
    assert state.keys() == plain.state_dict().keys()
    places = {name.removeprefix(START): place for name, place in pipe.device_map.items()}
    merged.requires_grad_(True).zero_grad()
    again = MappedGPipe(merged, places, chunks=2)
    compare(again.train(), plain.requires_grad_(True).train(), inputs)


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_an_adapter_of_a_head_whose_weight_is_at_home_elsewhere(devices):
    """The weight that the embedding shares with the head is on the first device."""
    model, inputs = adapted(targets=["q_proj", "lm_head"], tied=True)
    plain = copy.deepcopy(model)
    first = {START + name: devices[0] for name in ("model.embed_tokens", "model.layers.0")}
    pipe = MappedGPipe(model, {"": devices[1], **first}, chunks=2)
    compare(pipe, plain, inputs)
    merged, plain = pipe.eval().merge_and_unload(), plain.eval().merge_and_unload()
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    with torch.no_grad():
        expected = plain(**inputs).logits
        torch.testing.assert_close(merged(**inputs).logits.cpu(), expected)
        torch.testing.assert_close(pipe(**inputs).logits.cpu(), expected)


def test_packed_weights_in_partitions(devices):
    layers = nn.Sequential(*[PackedLinear(nn.Linear(4, 4)) for _ in range(2)], nn.Linear(4, 4))
    plain, x = copy.deepcopy(layers), torch.rand(4, 4)
    model = GPipe(layers, [1, 2], devices=devices[:2], chunks=2)
    torch.testing.assert_close(model(x.to(devices[0])).cpu(), plain(x))
