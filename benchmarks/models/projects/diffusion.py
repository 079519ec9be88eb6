"""Models of diffusion: guided-diffusion, denoising-diffusion, score_sde, DiT."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models.projects.parts import Attention, FeedForward, heads

__all__ = ["DenoisingDiffusion", "DiT", "GuidedDiffusion", "NCSNpp"]


def sinusoidal(t: Tensor, width: int) -> Tensor:
    """Embed times of shape (rows,)."""
    frequencies = torch.exp(
        torch.arange(width // 2, device=t.device) * (-math.log(1e4) / (width // 2))
    )
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], -1)


class ResBlock(nn.Module):
    """Two convolutions, with the embedding of the time in between."""

    def __init__(self, inputs: int, outputs: int, embedding: int = 64) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(4, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(embedding, outputs))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(4, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, emb: Tensor) -> Any:
        """Compute the block."""
        h = self.in_layers(x) + self.emb_layers(emb)[..., None, None]
        return self.skip(x) + self.out_layers(h)


class AttentionBlock(nn.Module):
    """Attention over the pixels of an image."""

    def __init__(self, channels: int, residual: bool = True) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv, self.proj = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)
        self.residual = residual

    def forward(self, x: Tensor) -> Any:
        """Attend."""
        q, k, v = self.qkv(self.norm(x).flatten(2)).transpose(1, 2).chunk(3, -1)
        found = F.scaled_dot_product_attention(heads(q, 2), heads(k, 2), heads(v, 2))
        out = self.proj(found.transpose(2, 3).flatten(1, 2)).view_as(x)
        return x + out if self.residual else out


class TimestepEmbedSequential(nn.Sequential):
    """A sequence that hands the embedding to the layers that take one."""

    # A sequence that takes a second argument, as the project has it.
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the layers."""
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class GuidedDiffusion(nn.Module):
    """The U-Net of guided-diffusion (Dhariwal and Nichol, 2021)."""

    def __init__(self, channels: int = 16, mult: tuple[int, ...] = (1, 2), depth: int = 2) -> None:
        super().__init__()
        self.channels = channels
        self.time_embed = nn.Sequential(nn.Linear(channels, 64), nn.SiLU(), nn.Linear(64, 64))
        self.label_emb = nn.Embedding(10, 64)
        wide = channels
        blocks: list[nn.Module] = [TimestepEmbedSequential(nn.Conv2d(3, wide, 3, padding=1))]
        widths = [wide]
        for level, times in enumerate(mult):
            for _ in range(depth):
                layers: list[nn.Module] = [ResBlock(wide, times * channels)]
                wide = times * channels
                if level:
                    layers.append(AttentionBlock(wide))
                blocks.append(TimestepEmbedSequential(*layers))
                widths.append(wide)
            if level + 1 < len(mult):
                down = nn.Conv2d(wide, wide, 3, stride=2, padding=1)
                blocks.append(TimestepEmbedSequential(down))
                widths.append(wide)
        self.input_blocks = nn.ModuleList(blocks)
        self.middle_block = TimestepEmbedSequential(
            ResBlock(wide, wide), AttentionBlock(wide), ResBlock(wide, wide)
        )
        blocks = []
        for level, times in [*enumerate(mult)][::-1]:
            for k in range(depth + 1):
                layers = [ResBlock(wide + widths.pop(), times * channels)]
                wide = times * channels
                if level:
                    layers.append(AttentionBlock(wide))
                if level and k == depth:
                    layers += [nn.Upsample(scale_factor=2), nn.Conv2d(wide, wide, 3, padding=1)]
                blocks.append(TimestepEmbedSequential(*layers))
        self.output_blocks = nn.ModuleList(blocks)
        self.out = nn.Sequential(nn.GroupNorm(4, wide), nn.SiLU(), nn.Conv2d(wide, 3, 3, padding=1))

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor) -> Any:
        """Predict the noise."""
        hs = []
        emb = self.time_embed(sinusoidal(timesteps, self.channels))
        emb = emb + self.label_emb(y)
        h = x
        for module in self.input_blocks:
            h = module(h, emb)
            hs.append(h)
        h = self.middle_block(h, emb)
        for module in self.output_blocks:
            h = torch.cat([h, hs.pop()], dim=1)
            h = module(h, emb)
        return self.out(h)


class DenoisingDiffusion(nn.Module):
    """The U-Net of denoising-diffusion-pytorch, with self-conditioning (Ho et al., 2020)."""

    def __init__(self, channels: int = 16, mult: tuple[int, ...] = (1, 1, 2)) -> None:
        super().__init__()
        self.channels = channels
        self.init_conv = nn.Conv2d(6, channels, 7, padding=3)
        self.time_mlp = nn.Sequential(nn.Linear(channels, 64), nn.GELU(), nn.Linear(64, 64))
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        pairs = [*zip([1, *mult], mult)]
        for k, (a, b) in enumerate(pairs):
            a, b, last = a * channels, b * channels, k == len(pairs) - 1
            down = nn.Conv2d(a, b, 3, padding=1) if last else nn.Conv2d(a, b, 4, 2, 1)
            self.downs.append(
                nn.ModuleList([ResBlock(a, a), ResBlock(a, a), AttentionBlock(a, False), down])
            )
        wide = mult[-1] * channels
        self.mid_block1, self.mid_block2 = ResBlock(wide, wide), ResBlock(wide, wide)
        self.mid_attn = AttentionBlock(wide, False)
        for k, (a, b) in enumerate(reversed(pairs)):
            a, b, last = a * channels, b * channels, k == len(pairs) - 1
            conv = nn.Conv2d(b, a, 3, padding=1)
            up = conv if last else nn.Sequential(nn.Upsample(scale_factor=2), conv)
            blocks = [ResBlock(a + b, b), ResBlock(a + b, b)]
            self.ups.append(nn.ModuleList([*blocks, AttentionBlock(b, False), up]))
        self.final_res_block = ResBlock(2 * channels, channels)
        self.final_conv = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor, time: Tensor, x_self_cond: Tensor | None = None) -> Any:
        """Predict the noise."""
        x_self_cond = x_self_cond if x_self_cond is not None else torch.zeros_like(x)
        x = self.init_conv(torch.cat((x_self_cond, x), dim=1))
        r = x.clone()
        t = self.time_mlp(sinusoidal(time, self.channels))
        h = []
        downs: Any = self.downs
        ups: Any = self.ups
        for block1, block2, attn, downsample in downs:
            x = block1(x, t)
            h.append(x)
            x = block2(x, t)
            x = attn(x) + x
            h.append(x)
            x = downsample(x)
        x = self.mid_block1(x, t)
        x = self.mid_attn(x) + x
        x = self.mid_block2(x, t)
        for block1, block2, attn, upsample in ups:
            x = upsample(self._up(x, h, t, block1, block2, attn))
        return self.final_conv(self.final_res_block(torch.cat((x, r), dim=1), t))

    @staticmethod
    def _up(x: Tensor, h: list[Tensor], t: Tensor, *blocks: nn.Module) -> Tensor:
        block1, block2, attn = blocks
        skip = h.pop()
        x = block1(torch.cat((x, skip), dim=1), t)
        x = block2(torch.cat((x, h.pop()), dim=1), t)
        found: Tensor = attn(x) + x
        return found


class NCSNpp(nn.Module):
    """NCSN++ of score_sde: one flat list of modules, and an index into it (Song et al., 2021)."""

    sigmas: Tensor

    def __init__(self, channels: int = 16, mult: tuple[int, ...] = (1, 2), depth: int = 2) -> None:
        super().__init__()
        self.channels, self.levels, self.depth = channels, len(mult), depth
        self.act = nn.SiLU()
        self.register_buffer("sigmas", torch.linspace(5.0, 0.1, 10))
        modules: list[nn.Module] = [nn.Linear(channels, 64), nn.Linear(64, 64)]
        modules.append(nn.Conv2d(3, channels, 3, padding=1))
        wide, widths, pyramid = channels, [channels], 3
        for level, times in enumerate(mult):
            for _ in range(depth):
                modules.append(ResBlock(wide, times * channels))
                wide = times * channels
                if level:
                    modules.append(AttentionBlock(wide))
                widths.append(wide)
            if level + 1 < len(mult):
                modules.append(nn.Conv2d(wide, wide, 3, stride=2, padding=1))
                # The input, smaller at each level, is added to what was computed of it.
                modules.append(nn.Conv2d(pyramid, wide, 1))
                widths.append(wide)
        modules += [ResBlock(wide, wide), AttentionBlock(wide), ResBlock(wide, wide)]
        for level, times in [*enumerate(mult)][::-1]:
            for _ in range(depth + 1):
                modules.append(ResBlock(wide + widths.pop(), times * channels))
                wide = times * channels
            modules += [nn.GroupNorm(4, wide), nn.Conv2d(wide, 3, 3, padding=1)]
            if level:
                modules.append(nn.ConvTranspose2d(wide, wide, 2, 2))
        self.all_modules = nn.ModuleList(modules)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """Estimate the score."""
        modules, m_idx = self.all_modules, 0
        used_sigmas = self.sigmas[labels]
        temb = sinusoidal(used_sigmas.log(), self.channels)
        temb = modules[m_idx](temb)
        m_idx += 1
        temb = modules[m_idx](self.act(temb))
        m_idx += 1
        input_pyramid = x
        hs = [modules[m_idx](2 * x - 1.0)]
        m_idx += 1
        for level in range(self.levels):
            for _ in range(self.depth):
                h = modules[m_idx](hs[-1], temb)
                m_idx += 1
                if level:
                    h = modules[m_idx](h)
                    m_idx += 1
                hs.append(h)
            if level + 1 < self.levels:
                h = modules[m_idx](hs[-1])
                m_idx += 1
                input_pyramid = F.avg_pool2d(input_pyramid, 2)
                h = (h + modules[m_idx](input_pyramid)) / math.sqrt(2.0)
                m_idx += 1
                hs.append(h)
        h = hs[-1]
        for number in range(3):
            h = modules[m_idx](h) if number == 1 else modules[m_idx](h, temb)
            m_idx += 1
        pyramid: Any = None
        for level in reversed(range(self.levels)):
            for _ in range(self.depth + 1):
                h = modules[m_idx](torch.cat([h, hs.pop()], dim=1), temb)
                m_idx += 1
            if pyramid is not None:
                pyramid = F.interpolate(pyramid, scale_factor=2)
            pyramid_h = self.act(modules[m_idx](h))
            m_idx += 1
            pyramid_h = modules[m_idx](pyramid_h)
            m_idx += 1
            pyramid = pyramid_h if pyramid is None else pyramid + pyramid_h
            if level:
                h = modules[m_idx](h)
                m_idx += 1
        assert not hs
        return pyramid / used_sigmas.reshape((x.shape[0], *([1] * len(x.shape[1:]))))


class DiTBlock(nn.Module):
    """A transformer block that is modulated by the condition."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width), FeedForward(width)
        self.adaln = nn.Sequential(nn.SiLU(), nn.Linear(width, 4 * width))

    def forward(self, x: Tensor, c: Tensor) -> Any:
        """Compute the block."""
        shift, gate, shift_mlp, gate_mlp = self.adaln(c).unsqueeze(1).chunk(4, -1)
        x = x + gate * self.attn(x + shift)
        return x + gate_mlp * self.mlp(x + shift_mlp)


class DiT(nn.Module):
    """A diffusion transformer (Peebles and Xie, 2023)."""

    pos_embed: Tensor

    def __init__(self, width: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.width = width
        self.x_embedder = nn.Conv2d(3, width, 4, 4)
        self.t_embedder = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.y_embedder = nn.Embedding(10, width)
        self.register_buffer("pos_embed", torch.randn(1, 16, width))
        self.blocks = nn.ModuleList([DiTBlock(width) for _ in range(depth)])
        self.final_layer = nn.Linear(width, 48)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Any:
        """Predict the noise."""
        h = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(sinusoidal(t, self.width)) + self.y_embedder(y)
        for block in self.blocks:
            h = block(h, c)
        h = self.final_layer(h)
        return (
            h.unflatten(1, (4, 4)).unflatten(-1, (4, 4, 3)).permute(0, 5, 1, 3, 2, 4).reshape_as(x)
        )
