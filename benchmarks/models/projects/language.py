"""Models of text: minGPT, RWKV, Zamba2, Mixtral, an encoder-decoder, Gemma 3n and others."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.projects.parts import Attention, FeedForward, RMSBlock, heads

__all__ = [
    *("AttentionResiduals", "EncoderDecoder", "Gemma3n", "MinGPT", "Mixture"),
    *("MultiToken", "RWKV", "Zamba2"),
]

WIDTH, WORDS = 32, 50


def angles_of(positions: Tensor, part: int = 16) -> Tensor:
    """Angles of rotary embeddings for positions of shape (rows, length)."""
    frequencies = 1e4 ** -(torch.arange(part // 2, device=positions.device) * 2 / part)
    return positions[..., None] * frequencies


class Block(nn.Module):
    """A block of minGPT."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(WIDTH, causal=True), FeedForward(WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Compute the block."""
        x = x + self.attn(x)
        return x + self.mlp(x)


class MinGPT(nn.Module):
    """The model of minGPT, whose loss takes labels that came in on the first device."""

    def __init__(self, depth: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(64, WIDTH),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([Block() for _ in range(depth)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            parts: Any = self.transformer
            self.lm_head.weight = parts.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        """Logits, and the loss."""
        parts: Any = self.transformer
        pos = torch.arange(0, idx.shape[1], dtype=torch.long, device=idx.device).unsqueeze(0)
        x = parts.drop(parts.wte(idx) + parts.wpe(pos))
        for block in parts.h:
            x = block(x)
        logits = self.lm_head(parts.ln_f(x))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.view(-1), ignore_index=-1)
        return logits, loss


class TimeMix(nn.Module):
    """The time mixing of RWKV: a decaying average of the values."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.mix = nn.Parameter(torch.rand(3, WIDTH))
        self.shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Any:
        """Mix over time."""
        past = self.shift(x)
        xk, xv, xr = [x * mix + past * (1 - mix) for mix in self.mix]
        k, v, r = self.key(xk).clamp(max=10).exp(), self.value(xv), self.receptance(xr).sigmoid()
        weight, total = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0])
        found, decay, first = [], torch.exp(-self.decay.exp()), self.first.exp()
        for t in range(x.shape[1]):
            now = first * k[:, t]
            found.append((total + now * v[:, t]) / (weight + now))
            total, weight = decay * total + k[:, t] * v[:, t], decay * weight + k[:, t]
        return self.output(r * torch.stack(found, 1))


class RWKVBlock(nn.Module):
    """Time mixing and channel mixing; the first block has a norm of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.ln0 = nn.LayerNorm(WIDTH) if number == 0 else None
        self.ln1 = nn.LayerNorm(WIDTH)
        self.att, self.ffn = TimeMix(), FeedForward(WIDTH)

    def forward(self, x: Tensor) -> Any:
        """Compute the block."""
        if self.ln0 is not None:
            x = self.ln0(x)
        x = x + self.att(self.ln1(x))
        return x + self.ffn(x)


class L2Wrap(torch.autograd.Function):
    """RWKV's function, which pulls the greatest logit of each place to 0 in backward."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, y: Tensor) -> Tensor:
        """Hand on the loss."""
        ctx.save_for_backward(y)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        """Add a gradient of the logits."""
        (y,) = ctx.saved_tensors
        factor = 1e-4 / (y.shape[0] * y.shape[1])
        maxx, ids = y.max(-1, keepdim=True)
        return grad_output, torch.zeros_like(y).scatter_(-1, ids, maxx * factor)


class RWKV(nn.Module):
    """RWKV-4 (Peng et al., 2023)."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([RWKVBlock(k) for k in range(depth)])
        self.ln_out, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        """The loss."""
        x = self.emb(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_out(x))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return L2Wrap.apply(loss, logits)


class Mamba(nn.Module):
    """A selective state space, step by step (Gu and Dao, 2023)."""

    def __init__(self, state: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.state = state
        self.in_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3)
        self.x_proj = nn.Linear(WIDTH, 2 * state + 1)
        self.a_log = nn.Parameter(torch.rand(WIDTH, state))
        self.d, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Compute the layer, without its residual."""
        x, z = self.in_proj(self.norm(x)).chunk(2, -1)
        length = x.shape[1]
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        b, c, delta = self.x_proj(x).split([self.state, self.state, 1], -1)
        delta = F.softplus(delta + self.bias)
        a = torch.exp(delta[..., None] * -self.a_log.exp())
        bx = (delta * x)[..., None] * b[:, :, None, :]
        h, found = torch.zeros_like(a[:, 0]), []
        for t in range(length):
            h = a[:, t] * h + bx[:, t]
            found.append((h * c[:, t, None, :]).sum(-1))
        y = torch.stack(found, 1) + self.d * x
        return self.out_proj(y * F.silu(z))


class SharedBlock(nn.Module):
    """The attention of Zamba2, which all hybrid layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(2 * WIDTH, causal=True)
        self.mlp = FeedForward(2 * WIDTH, 2)

    def forward(self, x: Tensor, original: Tensor) -> Any:
        """Attend over the stream and the embeddings beside each other."""
        h = torch.cat([x, original], -1)
        return self.mlp(self.attn(h))


class Hybrid(nn.Module):
    """A Mamba layer after the shared block, whose output a linear layer of its own takes."""

    def __init__(self, shared: SharedBlock) -> None:
        super().__init__()
        self.shared_transformer = shared
        self.linear, self.mamba = nn.Linear(2 * WIDTH, WIDTH), Mamba()

    def forward(self, x: Tensor, original: Tensor) -> Any:
        """Compute the layer."""
        return x + self.mamba(x + self.linear(self.shared_transformer(x, original)))


class Zamba2(nn.Module):
    """A hybrid of Mamba and one shared attention block (Glorioso et al., 2024)."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        shared = SharedBlock()
        self.layers = nn.ModuleList([Hybrid(shared) if k % 2 else Mamba() for k in range(depth)])
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x = original = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, original) if isinstance(layer, Hybrid) else x + layer(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Experts(nn.Module):
    """A feed-forward of experts, each for the tokens that the router sends."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList([FeedForward(WIDTH, 2) for _ in range(count)])

    def forward(self, x: Tensor) -> Any:
        """The output, and the router's logits."""
        flat = self.norm(x).flatten(0, 1)
        logits = self.router(flat)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for k, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == k)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return x + out.view_as(x), logits


class MixtureBlock(nn.Module):
    """Attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.moe = Attention(WIDTH, causal=True), Experts()

    def forward(self, x: Tensor) -> Any:
        """The output, and the router's logits."""
        return self.moe(x + self.attn(x))


class Mixture(nn.Module):
    """Mixture of experts, with a loss of all routers' logits together (Jiang et al., 2024)."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList([MixtureBlock() for _ in range(depth)])
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        """The loss."""
        x, routers = self.embed(ids), []
        for layer in self.layers:
            x, logits = layer(x)
            routers.append(logits)
        logits = self.lm_head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        probabilities = torch.cat([y.to(routers[0].device) for y in routers]).softmax(-1)
        mask = F.one_hot(probabilities.topk(2, -1).indices, probabilities.shape[-1])
        tokens = mask.float().mean(0).sum(0)
        return loss + 0.02 * (tokens * probabilities.mean(0)).sum() * len(tokens)


class DecoderBlock(nn.Module):
    """Attention to oneself, to the encoder's output, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attention(WIDTH, causal=True)
        self.look, self.think = Attention(WIDTH, context=WIDTH), FeedForward(WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Any:
        """Compute the block."""
        x = x + self.attend(x)
        x = x + self.look(x, memory, mask)
        return x + self.think(x)


class EncoderDecoder(nn.Module):
    """The first transformer, with one weight for both embeddings and the head (Vaswani, 2017)."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(64, WIDTH))
        self.encoder = nn.ModuleList(
            [nn.ModuleList([Attention(WIDTH), FeedForward(WIDTH)]) for _ in range(depth)]
        )
        self.decoder = nn.ModuleList([DecoderBlock() for _ in range(depth)])
        self.generator = nn.Linear(WIDTH, WORDS, bias=False)
        self.generator.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Any:
        """Logits of the next words."""
        mask = (source != 0)[:, None, None, :]
        memory = self.embedding(source) * WIDTH**0.5 + self.positions[: source.shape[1]]
        encoder: Any = self.encoder
        for attend, think in encoder:
            memory = memory + attend(memory, mask=mask)
            memory = memory + think(memory)
        x = self.embedding(target) * WIDTH**0.5 + self.positions[: target.shape[1]]
        for block in self.decoder:
            x = block(x, memory, mask)
        return self.generator(x).log_softmax(-1)


class Cache(UserDict[int, Any]):
    """An object into which layers write keys and values that later layers read."""


class Gemma3nBlock(nn.Module):
    """A block that writes its keys and values, or reads those of an earlier block."""

    def __init__(self, number: int, source: int | None) -> None:
        super().__init__()
        self.number, self.source = number, source
        self.norm, self.to_q = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH) if source is None else None
        self.to_out, self.mlp = nn.Linear(WIDTH, WIDTH), FeedForward(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache, own: Tensor) -> Any:
        """Compute the block, with the embedding of its own."""
        q = heads(self.to_q(self.norm(x)), 2)
        if self.to_kv is not None:
            k, v = [heads(y, 2) for y in self.to_kv(self.norm(x)).chunk(2, -1)]
            cache[self.number] = k, v
        else:
            # A block without keys of its own has a source.
            k, v = cache[self.source]  # type: ignore[index]
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(found.transpose(1, 2).flatten(2))
        x = x + self.mlp(x)
        return x + self.gate(x).sigmoid() * own


class Gemma3n(nn.Module):
    """Later blocks share keys and values; each has an embedding of its own (Gemma team, 2025)."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.embed_per_layer = nn.Embedding(WORDS, depth * WIDTH)
        half = depth // 2
        self.layers = nn.ModuleList(
            [Gemma3nBlock(k, None if k < half else half - 1 - k % 2) for k in range(depth)]
        )
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Any:
        """Logits of the next words."""
        x, cache = self.embed(ids), Cache()
        per_layer = self.embed_per_layer(ids).unflatten(-1, (len(self.layers), WIDTH))
        for k, layer in enumerate(self.layers):
            x = layer(x, cache, per_layer[:, :, k])
        return 30 * torch.tanh(self.lm_head(self.norm(x)) / 30)


class AttentionResiduals(nn.Module):
    """Each block reads a mixture of all outputs before it (Kimi team, 2025)."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])
        self.queries = nn.ParameterList([torch.randn(WIDTH) for _ in range(depth)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Any:
        """Logits of the next words."""
        outputs = [self.embed(ids)]
        for layer, query in zip(self.layers, self.queries):
            stacked = torch.stack(outputs)
            weights = torch.einsum("d,nbtd->nbt", query, stacked).softmax(0)
            outputs.append(layer(torch.einsum("nbt,nbtd->btd", weights, stacked)))
        return self.head(torch.stack(outputs).mean(0))


class MultiToken(nn.Module):
    """A Llama that predicts two words, the second by a block of its own (DeepSeek-AI, 2024)."""

    def __init__(self, depth: int = 7) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([RMSBlock(WIDTH) for _ in range(depth)])
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.mtp = nn.ModuleDict({"proj": nn.Linear(2 * WIDTH, WIDTH), "block": RMSBlock(WIDTH)})

    def forward(self, ids: Tensor) -> Any:
        """Losses of the next word, and of the one after it."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        x, angles = self.embed_tokens(ids), angles_of(positions)
        for layer in self.layers:
            x = layer(x, angles)
        parts: Any = self.mtp
        logits = self.lm_head(self.norm(x))
        main = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        following = self.embed_tokens(ids.roll(-1, 1))
        x = parts.block(parts.proj(torch.cat([self.norm(x), following], -1)), angles)
        logits = self.lm_head(self.norm(x))
        return main, F.cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten())
