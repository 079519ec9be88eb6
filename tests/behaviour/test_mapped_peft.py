"""A model with adapters trains under a device map, and what needs no gradient takes no time."""

import copy
from functools import partial

import pytest
import torch

from tests.examples import MISSING
from tests.support.architectures import build
from tests.support.packed import pack
from torchgpipe import MappedGPipe, is_recomputing
from torchgpipe.planner import maps
from torchgpipe.planner.blocks import timed

#: PEFT asks Transformers so.
IGNORED = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
pytestmark = IGNORED

CPU = torch.device("cpu")
START = "base_model.model."


def adapted(layers=None, packed=False, saved=None, targets=("q_proj", "v_proj"), tied=False):
    """A Llama of three layers with LoRA, some of which may go without, and four rows for it.

    Args:
        layers: those with LoRA; by default all.
        packed: whether the weights of the others have four bits.
        saved: modules that are trained as a whole.
        targets: modules with LoRA.
        tied: whether the head has the weight of the embedding.
    """
    peft = pytest.importorskip("peft", exc_type=MISSING)
    model, inputs = build("llama")
    model = pack(model) if packed else model
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    config = peft.LoraConfig(
        r=2,
        target_modules=[*targets],
        layers_to_transform=layers,
        # Or one of the two gradients of each adapter is zero.
        init_lora_weights=False,
        modules_to_save=saved,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config), inputs


def names(devices):
    """A map in the names of the model with its adapters."""
    first, *_, last = devices
    layers = {f"{START}model.layers.{k}": devices[k * len(devices) // 3] for k in range(3)}
    return {
        f"{START}model.embed_tokens": first,
        **layers,
        f"{START}model.norm": last,
        f"{START}lm_head": last,
    }


def compare(devices, mode, layers=None, inputs_too=False, packed=False):
    """Train a step, and compare it with the micro-batches one after another."""
    model, inputs = adapted(layers, packed)
    if inputs_too:
        # As those do who use PyTorch's checkpoints.
        model.enable_input_require_grads()
    plain = copy.deepcopy(model)
    rows = [{key: x[k : k + 2] for key, x in inputs.items()} for k in (0, 2)]
    losses = torch.stack([plain(**row).loss for row in rows])
    losses.mean().backward()
    pipe = MappedGPipe(model, names(devices), chunks=2, checkpoint=mode)
    out = pipe(**inputs)
    out.loss.mean().backward()
    torch.testing.assert_close(out.loss.cpu(), losses)
    found = dict(pipe.named_parameters())
    assert any("lora_A" in name for name in found)
    for name, other in plain.named_parameters():
        assert (found[name].grad is None) == (other.grad is None), name
        assert (found[name].grad is not None) == ("lora_" in name), name
        if other.grad is not None:
            assert other.grad.any()
            torch.testing.assert_close(found[name].grad.cpu(), other.grad)


@pytest.mark.parametrize("layers", [None, [2]], ids=["all layers", "last layer"])
def test_gradients(mode, layers):
    compare([CPU] * 3, mode, layers)


def test_embeddings_that_require_grad(mode):
    compare([CPU] * 3, mode, [2], inputs_too=True)


def test_a_cache_that_an_adapter_gives(mode):
    """Leave out the cache of virtual tokens, since those of micro-batches cannot be joined."""
    peft = pytest.importorskip("peft", exc_type=MISSING)
    model, inputs = build("llama")
    config = peft.PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    plain = copy.deepcopy(model)
    losses = torch.stack(
        [plain(**{k: x[a : a + 2] for k, x in inputs.items()}).loss for a in (0, 2)]
    )
    losses.mean().backward()
    out = MappedGPipe(model, {"": CPU}, chunks=2, checkpoint=mode)(**inputs)
    out.loss.mean().backward()
    assert [*out] == ["loss", "logits"]
    torch.testing.assert_close(out.loss, losses)
    for own, other in zip(model.prompt_encoder.parameters(), plain.prompt_encoder.parameters()):
        torch.testing.assert_close(own.grad, other.grad)


def test_packed_weights(mode):
    compare([CPU] * 2, mode, packed=True)


def test_a_map_that_is_measured(monkeypatch):
    monkeypatch.setattr(maps, "timed", partial(timed, timeout=0))
    model, inputs = adapted()
    sample = {key: x[:2] for key, x in inputs.items()}
    pipe = MappedGPipe(model, "auto", sample=sample, devices=[CPU] * 3, chunks=2)
    assert pipe.device_map.keys() == {"", *names([CPU] * 3)}
    pipe(**inputs).loss.mean().backward()
    assert all((x.grad is not None) == x.requires_grad for x in pipe.parameters())


class Counted(torch.autograd.Function):
    """The identity, which counts the gradients that pass."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.count()
        return grad, None


def test_what_is_in_front_of_the_adapters_runs_forward_only(mode):
    model, inputs = adapted([2])
    backward, again = [0, 0, 0], [0, 0, 0]

    def watch(k, layer):
        def count():
            backward[k] += 1

        def before(*_):
            again[k] += is_recomputing()

        # A recomputation may end within a layer, so that no hook after it would run.
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(lambda _, __, output: Counted.apply(output, count))

    for k, layer in enumerate(model.get_submodule(f"{START}model.layers")):
        watch(k, layer)
    pipe = MappedGPipe(model, names([CPU] * 3), chunks=2, checkpoint=mode)
    pipe(**inputs).loss.mean().backward()
    assert backward == [0, 0, 2]
    assert again == [0, 0, {"never": 0, "except_last": 1, "always": 2}[mode]]


def test_state_dict_and_saved_adapters(tmp_path):
    peft = pytest.importorskip("peft", exc_type=MISSING)
    model, inputs = adapted()
    plain = copy.deepcopy(model)
    pipe = MappedGPipe(model, names([CPU] * 3), chunks=2)
    assert pipe.state_dict().keys() == plain.state_dict().keys()
    optimizer = torch.optim.SGD([x for x in pipe.parameters() if x.requires_grad], lr=0.1)
    pipe(**inputs).loss.mean().backward()
    optimizer.step()
    found = peft.get_peft_model_state_dict(pipe)
    assert found.keys() == peft.get_peft_model_state_dict(plain).keys()
    assert all("lora_" in name for name in found)
    pipe.save_pretrained(tmp_path)
    base, _ = build("llama")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).train()
    torch.testing.assert_close(loaded(**inputs).logits, pipe(**inputs).logits)
