"""A language model like GPT-2, with two layers for each block."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["gpt"]


class Embed(nn.Module):
    """Embed tokens ``(rows, length)`` as features ``(rows, length, width)``."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        output: Tensor = self.dropout(embedded)
        return output


class Attention(nn.Module):
    """Add causal self-attention to the features."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.inputs(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = inputs.transpose(1, 3).unbind(2)
        dropout = self.dropout.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
        output: Tensor = x + self.dropout(self.output(attended.transpose(1, 2).flatten(2)))
        return output


class FeedForward(nn.Module):
    """Add the output of a network with one hidden layer to each position's features."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.hidden(self.norm(x)), approximate="tanh")
        output: Tensor = x + self.dropout(self.output(hidden))
        return output


def initialise(model: nn.Module, layers: int) -> None:
    """Initialise a model at random as GPT-2 was."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            # The more terms a residual sum has, the smaller each of them.
            std = 0.02 / math.sqrt(2 * layers) if name.endswith(".output") else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def gpt(
    vocabulary: int = 50257,
    context: int = 1024,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    dropout: float = 0.0,
) -> nn.Sequential:
    """A decoder: tokens ``(rows, length)`` to logits ``(rows, length, vocabulary)``.

    The structure and the defaults are those of the smallest GPT-2 (Radford et al., 2019, "Language
    models are unsupervised multitask learners"): normalisation before attention and before the
    feed-forward network, and learnt positions. Only the head differs: it has weights of its own,
    since the embedding, whose weights GPT-2 uses there, is on another device.

    Args:
        vocabulary: number of tokens.
        context: the greatest length.
        layers: number of blocks, each of two layers of the ``nn.Sequential``.
        width: of the features.
        heads: number of attention heads, which share the width.
        dropout: share of the features, and of the attention, to drop in training.

    Raises:
        ValueError: the width is not a multiple of the heads.
    """
    if width % heads:
        raise ValueError(
            f"the width must be a multiple of the heads (width: {width}, heads: {heads}); "
            f"take {heads * math.ceil(width / heads)}"
        )
    found: OrderedDict[str, nn.Module] = OrderedDict()
    found["embed"] = Embed(vocabulary, context, width, dropout)
    for k in range(1, layers + 1):
        found[f"attention{k}"] = Attention(width, heads, dropout)
        found[f"feed_forward{k}"] = FeedForward(width, dropout)
    found["norm"] = nn.LayerNorm(width)
    found["head"] = nn.Linear(width, vocabulary, bias=False)
    model = nn.Sequential(found)
    initialise(model, layers)
    return model
