"""Train a LoRA network outside of a diffusion transformer, which is over several devices.

The network is as trainers of LoRAs for pictures have it (kohya's sd-scripts): its modules are no
children of the model. Each has a pair of small matrices, and replaces the forward of one linear
layer. The model is frozen, and MappedGPipe trains through it, in a loop of one's own, by flow
matching. Each pair must be on the device of its linear layer. So the network is made after the
wrapper, which moves the model alone. The network is saved alone, in a file that is loaded into the
plain model at the end.

A plain model with a network of its own gets the same whole mini-batches, so losses have to be
equal, from the first step to the last. The model has random weights, since none come along::

    pip install safetensors
    python -m examples.diffusion_lora
    python -m examples.diffusion_lora --rank 16 --chunks 8 --checkpoint always
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import MappedGPipe

PARTITIONS, BLOCKS, WIDTH, HEADS = 4, 8, 32, 2
SIZE, PATCH, CLASSES, ROWS = 8, 2, 4, 32


class Modulated(nn.Module):
    """A norm and a layer, whose shift, scale and gate come from the condition (adaLN)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 3 * WIDTH))
        self.layer = layer

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, dim=-1)
        output: Tensor = gate * self.layer(self.norm(x) * (1 + scale) + shift)
        return output


class Attention(nn.Module):
    """Attention of all patches to all patches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.chunk(3, dim=1))
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Attention, and two linear layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        mlp = [nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        self.attention, self.mlp = Modulated(Attention()), Modulated(nn.Sequential(*mlp))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        x = x + self.attention(x, condition)
        output: Tensor = x + self.mlp(x, condition)
        return output


class DiT(nn.Module):
    """A diffusion transformer: patches, conditioned blocks, and patches again."""

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.register_buffer("frequencies", 2.0 ** torch.arange(WIDTH // 2))
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.label = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.final = Modulated(nn.Linear(WIDTH, WIDTH))
        self.pixels = nn.Linear(WIDTH, PATCH**2)

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        angles = time[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(label)
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        x = self.pixels(self.final(x, condition))
        return F.fold(x.transpose(1, 2), SIZE, PATCH, stride=PATCH)


class LoRA(nn.Module):
    """A pair of small matrices, whose product a linear layer adds to its own."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        # Where the wrapper has put the layer. A pair that was made before it: .to(linear.weight).
        own = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_down = nn.Linear(linear.in_features, rank, bias=False, **own)
        self.lora_up = nn.Linear(rank, linear.out_features, bias=False, **own)
        nn.init.zeros_(self.lora_up.weight)
        # The method of a module is no child.
        self.before = linear.forward
        linear.forward = self.forward  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.before(x) + self.lora_up(self.lora_down(x))
        return output


class Network(nn.Module):
    """The pairs of all linear layers of a model, which does not have them among its modules."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__()
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, nn.Linear):
                self.add_module(f"lora_unet_{name.replace('.', '_')}", LoRA(layer, rank))


def even_map(devices: list[torch.device]) -> dict[str, torch.device]:
    """Put as many blocks on each device; what comes before and after them, on the outer devices."""
    blocks = {f"blocks.{k}": devices[k * len(devices) // BLOCKS] for k in range(BLOCKS)}
    return {"": devices[0], **blocks, "final": devices[-1], "pixels": devices[-1]}


def pictures() -> tuple[Tensor, Tensor]:
    """A mini-batch of pictures with one bright quarter, and the numbers of these quarters."""
    labels = torch.randint(CLASSES, (ROWS,))
    quarters = 2 * F.one_hot(labels, CLASSES).double().view(-1, 1, 2, 2) - 1
    return F.interpolate(quarters, size=SIZE), labels


def train(model: nn.Module, network: Network, device: torch.device, steps: int) -> list[float]:
    """Train a network by flow matching; return the loss of each step.

    Args:
        model: the frozen model, whose linear layers call the network.
        network: the network.
        device: where the model takes its inputs.
        steps: the number of mini-batches.
    """
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(network.parameters(), 0.01), []
    for _ in range(steps):
        x, labels = pictures()
        noise, time = torch.randn_like(x), torch.rand(ROWS).double()
        mixed = torch.lerp(x, noise, time[:, None, None, None])
        velocity = model(mixed.to(device), time.to(device), labels.to(device))
        loss = F.mse_loss(velocity, (noise - x).to(velocity.device))
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    """Train a network; return 0 if all is as in the plain model, and the loss has fallen."""
    parser = argparse.ArgumentParser(description="Train a LoRA network outside of the model.")
    parser.add_argument("--steps", type=at_least(2), default=60, help="mini-batches")
    parser.add_argument("--rank", type=at_least(1), default=4)
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, devices = DiT().double().requires_grad_(False), places(PARTITIONS)
    plain = copy.deepcopy(model).to(devices[0])
    fresh = copy.deepcopy(model)
    pipe = MappedGPipe(
        model, even_map(devices), chunks=options.chunks, checkpoint=options.checkpoint
    )
    network, other = Network(model, options.rank), Network(plain, options.rank)
    other.load_state_dict(network.state_dict())

    found = train(pipe, network, devices[0], options.steps)
    expected = train(plain, other, devices[0], options.steps)
    print(f"{'step':>5}  {'loss':>9}  {'plain':>9}")
    for k in range(0, options.steps, -(-options.steps // 10)):
        print(f"{k + 1:5}  {found[k]:9.6f}  {expected[k]:9.6f}")
    apart = max(abs(a - b) for a, b in zip(found, expected))

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lora.safetensors"
        save_file({name: x.cpu() for name, x in network.state_dict().items()}, file)
        sizes = [sum(x.nbytes for x in m.state_dict().values()) / 1024 for m in (network, fresh)]
        loaded = Network(fresh, options.rank)
        loaded.load_state_dict(load_file(file))
    x, labels = pictures()
    inputs = x, torch.rand(ROWS).double(), labels
    with torch.no_grad():
        gap = (pipe(*[x.to(devices[0]) for x in inputs]).cpu() - fresh(*inputs)).abs().max().item()
    print(f"\nThe file has {sizes[0]:.0f} KiB, and the model {sizes[1]:.0f} KiB. Losses are within")
    print(f"{apart:.1e} of the plain model's, and its outputs with the file within {gap:.1e}.")
    frozen = all(torch.equal(x.cpu(), y) for x, y in zip(model.parameters(), fresh.parameters()))
    if max(apart, gap) < 1e-9 and frozen and found[-1] < found[0]:
        return 0
    print("\nNot as it should be: losses or outputs differ by 1e-9 or more, the loss has not")
    print("fallen, or the model has changed.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
