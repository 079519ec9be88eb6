"""Lazy outputs: whatever stands beside a loss is computed when somebody looks at it."""

import copy
import itertools
import pickle
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

from tests.support.mapping import tokens
from torchgpipe import Chunks, MappedGPipe, keep


class Model(nn.Module):
    """A model whose head counts its calls."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop = nn.Embedding(128, 8), nn.Dropout(0.2)
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 128))
        self.calls = 0
        self.head.register_forward_hook(self.count)

    def count(self, *_):
        self.calls += 1

    def forward(self, ids, labels=None):
        logits = self.head(self.drop(self.embed(ids))).float()
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.to(logits.device).flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def piped(mode="always", **options):
    torch.manual_seed(0)
    pipe = MappedGPipe(Model(), {"": "cpu", "head": "cpu"}, chunks=2, checkpoint=mode, **options)
    ids = tokens(4)
    torch.manual_seed(1)
    return pipe, pipe(ids, labels=ids)


def grads(pipe, loss):
    pipe.zero_grad()
    loss.backward()
    return [x.grad.clone() for x in pipe.parameters()]


USES = {
    "loss": lambda out: out.loss.sum(),
    "logits": lambda out: out.logits.pow(2).mean(),
    "both": lambda out: out.loss.sum() + out[1].pow(2).mean(),
    "by name": lambda out: out["loss"].sum() * 2 + out["logits"].tanh().mean(),
    "in place": lambda out: out.logits.mul_(2).add_(1).pow(2).mean() + out.loss.mean(),
    "once looked at without grad": lambda out: out.logits.std() + seen(out),
}


def seen(out):
    with torch.no_grad():
        return out.logits.argmax(-1).float().mean()


@pytest.mark.parametrize("use", USES.values(), ids=[*USES])
def test_gradients(use):
    expected, found = (grads(pipe, use(out)) for pipe, out in map(piped, ("never", "always")))
    torch.testing.assert_close(found, expected)


LOOKS = {
    "attribute": lambda out: out.logits,
    "name": lambda out: out["logits"],
    "number": lambda out: out[1],
    "slice": lambda out: out[:][1],
    "get": lambda out: out.get("logits"),
    "values": lambda out: [*out.values()][1],
    "items": lambda out: dict(out.items())["logits"],
    "dict": lambda out: dict(out)["logits"],
    "stars": lambda out: {**out}["logits"],
    "keywords": lambda out: dict(**out)["logits"],
    "tuple": lambda out: out.to_tuple()[1],
    "vars": lambda out: vars(out)["logits"],
    "getattr": lambda out: [getattr(out, x.name) for x in fields(out)][1],
    "copy": lambda out: copy.copy(out).logits,
    "tree": lambda out: pytree.tree_map(lambda x: x, out).logits,
    "same class": lambda out: type(out)(**dict(out.items())).logits,
    "pickle": lambda out: pickle.loads(pickle.dumps(pytree.tree_map(torch.detach, out))).logits,
    "words": lambda out: (repr(out), out.logits)[1],
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=[*LOOKS])
def test_ways_to_look(look):
    _, expected = piped("never")
    _, out = piped()
    assert isinstance(out, CausalLMOutput)
    assert torch.equal(look(out), expected.logits)
    assert type(out) is CausalLMOutput
    assert torch.equal(out.logits, expected.logits)


def test_a_caller_who_does_not_look():
    pipe, out = piped()
    assert pipe.module.calls == 2
    out.loss.mean().backward()
    # The loss, what is there and how much do not matter.
    assert out[0] is out["loss"] is out.loss
    assert "logits" in out
    assert len(out) == 2
    assert [*out] == [*out.keys()] == ["loss", "logits"]
    assert type(out) is not CausalLMOutput
    assert pipe.module.calls == 4


def test_looks_after_backward():
    _, expected = piped("never")
    pipe, out = piped()
    out.loss.mean().backward()
    # Weights and random numbers are those of the forward.
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(out.logits, expected.logits)
    assert torch.equal(torch.get_rng_state(), before)
    assert pipe.module.calls == 6
    # Once is enough.
    assert out.logits is out[1]
    assert pipe.module.calls == 6


def test_looks_after_the_weights_have_changed():
    pipe, out = piped()
    out.loss.mean().backward()
    torch.optim.SGD(pipe.parameters(), 0.1).step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="look at it before the optimizer's step") as caught:
            _ = out.logits
        assert "checkpoint='except_last'" in str(caught.value)
    assert out.loss.shape == (2,)


class Deep(Model):
    """A model that returns what two layers have made, and a number for each word."""

    def forward(self, ids, labels=None):
        out = super().forward(ids, labels)
        hidden = self.embed(ids), out.logits[..., :3]
        return CausalLMOutput(loss=out.loss, logits=out.logits, hidden_states=hidden)


@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
def test_outputs_are_joined_when_somebody_looks(mode):
    pipe = MappedGPipe(Deep().eval(), {"": "cpu"}, chunks=2, checkpoint=mode)
    ids = tokens(4)
    out, expected = pipe(ids, labels=ids), pipe.module(ids, labels=ids)
    assert type(out) is not CausalLMOutput
    assert out.loss.shape == (2,)
    with torch.no_grad():
        torch.testing.assert_close(out.hidden_states, expected.hidden_states)
    assert type(out) is CausalLMOutput
    assert [*out] == ["loss", "logits", "hidden_states"]
    # Whoever looked first did not need gradients.
    own = torch.autograd.grad(out.logits.square().mean(), pipe.module.embed.weight)
    other = torch.autograd.grad(expected.logits.square().mean(), pipe.module.embed.weight)
    torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kind", ["no labels", "no grad"])
def test_outputs_that_are_there(kind):
    pipe, _ = piped()
    ids = tokens(4)
    with torch.set_grad_enabled(kind != "no grad"):
        out = pipe(ids, labels=None if kind == "no labels" else ids)
    assert type(out) is CausalLMOutput


def test_micro_batches_that_the_caller_has_divided():
    found = []
    for mode in ("never", "always"):
        pipe, _ = piped(mode)
        ids = tokens(4)
        parts = Chunks([ids[:1], ids[1:]])
        torch.manual_seed(2)
        outs = pipe(parts, labels=parts)
        loss = sum(out.loss for out in outs) + outs[1].logits.std()
        assert [type(out) is CausalLMOutput for out in outs] == [mode == "never", True]
        found.append([*grads(pipe, loss), outs[0].logits, outs[1].logits])
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Drawing(nn.Dropout):
    """Drop out what another generator says, and keep that for the recomputation."""

    def forward(self, x):
        return x * keep(torch.rand(x.shape, generator=torch.Generator().manual_seed(next(COUNT))))


COUNT = itertools.count()


def test_a_head_that_keeps_values():
    pipe, _ = piped()
    pipe.module.head[0] = Drawing()
    ids = tokens(4)
    out = pipe(ids, labels=ids)
    out.loss.mean().backward()
    # The loss was computed from what is computed now.
    expected = F.cross_entropy(out.logits[:2].flatten(0, 1), ids[:2].flatten())
    torch.testing.assert_close(out.loss[0], expected)
