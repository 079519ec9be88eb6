"""Decoders that people have become graphs, and compute what eager stages do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.architectures import DEEP, GPT, GROUPED, SIZES
from tests.support.helpers import assert_graphs
from tests.support.size import SOAK
from torchgpipe import GPipe, ScheduledLoss

ONE = {**GROUPED, "num_hidden_layers": 1}
HEAD = {**ONE, "head_dim": 8}
OPT = {**SIZES, "ffn_dim": 32, "num_hidden_layers": 1, "word_embed_proj_dim": 16}

#: By name, the class of a decoder without a head, and the sizes of one layer.
DECODERS = {
    "Llama": ONE,
    "Mistral": ONE,
    "Qwen2": ONE,
    "Qwen3": HEAD,
    "Gemma2": HEAD,
    "GPT2": {**GPT, "n_layer": 1, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2},
    "GPTNeoX": {**DEEP, "num_hidden_layers": 1},
    "OPT": {**OPT, "max_position_embeddings": 32},
    "Falcon": {**SIZES, "num_hidden_layers": 1},
    "Phi": {**DEEP, "num_hidden_layers": 1},
    "Bloom": {"vocab_size": 32, "hidden_size": 16, "n_layer": 1, "n_head": 2},
}


class Decoder(nn.Module):
    """One layer of a decoder, as a stage of its own."""

    def __init__(self, name, first):
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{name}Config")(**DECODERS[name])
        config._attn_implementation = "eager"
        self.base, self.first = getattr(transformers, f"{name}Model")(config), first

    def forward(self, x):
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        return self.base(**given, use_cache=False)[0]


def tokens(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def decoder(name):
    layers = [Decoder(name, first) for first in (True, False)]
    ids = torch.randint(3, 32, (4, 6))
    return nn.Sequential(*layers, nn.Linear(16, 32)), ids, ids, tokens


@pytest.mark.parametrize("mode", ["never", "always"] if SOAK else ["always"])
@pytest.mark.parametrize("schedule", ["1f1b", "zbh1"] if SOAK else ["zbh1"])
@pytest.mark.parametrize("name", DECODERS if SOAK else ["GPT2"])
def test_model(name, schedule, mode):
    torch.manual_seed(0)
    model, input, target, loss = decoder(name)
    balance = [1] * len(model)
    found = []
    for stages in ("eager", "graph"):
        layers = copy.deepcopy(model)
        pipe = GPipe(layers, balance, devices=["cpu"] * len(model), chunks=2, checkpoint=mode)
        training = ScheduledLoss(pipe, loss, schedule, stages=stages)
        torch.manual_seed(1)
        for _ in range(2):
            training(input, target).backward()
        found.append([*[p.grad for p in pipe.parameters()], *pipe.buffers()])
    assert_graphs(training)
    for a, b in zip(*found):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
