"""Models to spread over devices: GPTs of blocks, and an encoder with a decoder."""

import copy
import gc

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import MappedGPipe

WORDS, WIDTH, LENGTH = 128, 64, 16


class Block(nn.Module):
    """Attention and a wide layer, with residual connections around both.

    Args:
        width: the features.
        wide: those of the wide layer.
        crosses: whether it also attends to what an encoder returns.
    """

    def __init__(self, width=WIDTH, wide=4 * WIDTH, crosses=False):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.cross = nn.Linear(width, 2 * width) if crosses else None
        self.wide = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def attend(self, q, k, v):
        q, k, v = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def forward(self, x, encoded=None):
        x = x + self.out(self.attend(*self.attention(self.norm(x)).chunk(3, -1)))
        if self.cross is not None:
            x = x + self.attend(x, *self.cross(encoded).chunk(2, -1))
        return x + self.wide(self.last(x))


class GPT(nn.Module):
    """A GPT with a loss of its own.

    Args:
        wides: the features of the wide layer of each block.
        tied: whether the head has the weight of the embedding.
        has_loss: whether it returns the loss, and not the logits.
    """

    def __init__(self, wides=(4 * WIDTH,) * 6, tied=False, has_loss=True):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(wide=x) for x in wides])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.has_loss = has_loss
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if not self.has_loss:
            return logits
        labels = tokens[:, 1:].to(logits.device)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())


class EncoderDecoder(nn.Module):
    """An encoder, and a decoder each of whose blocks gets what the encoder returns."""

    def __init__(self, count=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Block() for _ in range(count)])
        self.start = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.ModuleList([Block(crosses=True) for _ in range(count)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, words):
        encoded = self.embed(tokens)
        for block in self.encoder:
            encoded = block(encoded)
        x = self.start(words)
        for block in self.decoder:
            x = block(x, encoded)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), words.to(logits.device).flatten())


def tokens(rows):
    """Random tokens."""
    return torch.randint(WORDS, (rows, LENGTH))


def measured(model, device_map, arguments, chunks, checkpoint):
    """Train a copy of a model for two steps, and return the most memory of each device."""
    devices = [*dict.fromkeys(device_map.values())]
    gc.collect()
    before = {device: torch.accelerator.memory_allocated(device) for device in devices}
    pipe = MappedGPipe(copy.deepcopy(model), device_map, chunks=chunks, checkpoint=checkpoint)
    arguments = [x.to(devices[0]) for x in arguments]
    optimizer = torch.optim.AdamW(pipe.parameters())
    for step in range(2):
        optimizer.zero_grad()
        for device in devices:
            torch.accelerator.reset_peak_memory_stats(device)
        # Held until backward is over, as most callers do.
        returned = pipe(*arguments)
        output = getattr(returned, "loss", returned)
        loss = (
            F.cross_entropy(output.flatten(0, 1), arguments[0].to(output.device).flatten())
            if output.dim() > 1
            else output.mean()
        )
        loss.backward()
        found = {x: torch.accelerator.max_memory_allocated(x) - before[x] for x in devices}
        if not step:
            optimizer.step()
        del returned, output, loss
    return found
