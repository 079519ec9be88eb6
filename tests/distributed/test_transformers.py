"""Models of Transformers train over several processes, by the plans of their configurations."""

import copy

import pytest
import torch

from tests.examples import MISSING
from tests.unit.transformers.test_sequential import batch, causal_loss, model_of

pytest.importorskip("transformers", exc_type=MISSING)


def beside_plain(group, name, schedule, options):
    from torchgpipe.distributed import Pipe
    from torchgpipe.transformers import layers_of

    model = model_of(name, **options)
    plain, inputs = copy.deepcopy(model), batch()
    pipe = Pipe(
        layers_of(model), [3, 4], loss=causal_loss, schedule=schedule, chunks=2, group=group
    )
    found = pipe.step(inputs, inputs["input_ids"])
    expected = causal_loss(plain(**inputs).logits, inputs["input_ids"])
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    names = {id(x): key for key, x in model.named_parameters()}
    others = dict(plain.named_parameters())
    own = [(names[id(x)], x) for x in pipe.parameters()]
    for key, x in own:
        torch.testing.assert_close(x.grad, others[key].grad, rtol=1e-4, atol=1e-6)
    return [key for key, _ in own]


@pytest.mark.parametrize(
    ("name", "schedule", "options"),
    [
        ("Llama", "1f1b", {}),
        ("Qwen2", "fill_drain", {}),
        ("Mistral", "1f1b", {}),
        ("Llama", "1f1b", {"tie_word_embeddings": True}),
    ],
)
def test_gradients(processes, name, schedule, options):
    first, second = processes.run(beside_plain, 2, name, schedule, options)
    everything = [key for key, _ in model_of(name, **options).named_parameters()]
    assert {*first} | {*second} == {*everything}
    assert any("layers.0" in key for key in first)
    assert any("layers.3" in key for key in second)
