"""The decoder computes what GPT-2 does, and no place attends to a later one."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.models import gpt
from tests.benchmarks.models import children, make


def test_values():
    """The reference computes step by step, with the whole matrix of attention."""
    model, tokens = make("gpt")
    layers, width, heads = children(model), 8, 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = layers["embed"].tokens.weight[tokens] + layers["embed"].places.weight[:6]
    later = torch.ones(6, 6).triu(1).bool()
    for k in (1, 2):
        layer = layers[f"attention{k}"]
        inputs = layer.inputs(F.layer_norm(x, [width], layer.norm.weight, layer.norm.bias))
        outputs = []
        for head in range(heads):
            # First all queries, then all keys, then all values; in each, head after head.
            at = [slice(p * width + 4 * head, p * width + 4 * head + 4) for p in range(3)]
            query, key, value = (inputs[..., part] for part in at)
            scores = (query @ key.mT / 4**0.5).masked_fill(later, float("-inf"))
            outputs.append(scores.softmax(-1) @ value)
        x = x + layer.output(torch.cat(outputs, -1))
        layer = layers[f"feed_forward{k}"]
        hidden = layer.hidden(F.layer_norm(x, [width], layer.norm.weight, layer.norm.bias))
        x = x + layer.output(F.gelu(hidden, approximate="tanh"))
    expected = layers["norm"](x) @ layers["head"].weight.T
    assert expected.shape == (4, 6, 11)
    torch.testing.assert_close(model(tokens), expected)


def test_causality():
    model, tokens = make("gpt")
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % 11
    before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :3], after[:, :3], rtol=0, atol=0)
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


def test_weights_begin_small():
    model = gpt(50, 20, layers=8, width=64, heads=4)
    layers = children(model)
    for weight, expected in (
        (layers["embed"].tokens.weight, 0.02),
        (layers["attention3"].inputs.weight, 0.02),
        (layers["attention3"].output.weight, 0.005),
        (layers["feed_forward8"].output.weight, 0.005),
        (layers["head"].weight, 0.02),
    ):
        assert weight.std().item() == pytest.approx(expected, rel=0.1)
    assert not layers["feed_forward1"].hidden.bias.any()


def test_errors():
    with pytest.raises(ValueError, match=r"\(width: 8, heads: 3\); take 9"):
        gpt(11, 8, layers=1, width=8, heads=3)
