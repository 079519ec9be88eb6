"""Train a model whose blocks PyTorch compiles, under GPipe and as it is, side by side.

Each block is compiled in place before wrapping. All blocks are of one class, so they share its
graphs: one for the first size, and one for any size once mini-batches differ. The plain model is
not compiled, and sees the same mini-batches.

    python -m examples.compiled
    python -m examples.compiled --backend aot_eager    # on a CPU without a C++ compiler
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from examples.options import CHECKPOINT, at_least
from examples.places import places
from torchgpipe import GPipe

FEATURES, WIDTH, CLASSES = 16, 32, 4


class Block(nn.Module):
    """A residual block, which is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def classifier() -> nn.Sequential:
    """Eight layers, six of them blocks."""
    blocks = [Block() for _ in range(6)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, CLASSES))


def train(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[float], list[int]]:
    """Train a model; return the losses, and the number of graphs after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.005)
    losses, graphs = [], []
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        loss = F.cross_entropy(output, y.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        graphs.append(counters["stats"]["unique_graphs"])
    return losses, graphs


def main(arguments: list[str] | None = None) -> int:
    """Train both models; return 0 if losses are equal, and fall, and compiling has an end."""
    parser = argparse.ArgumentParser(description="Train a model whose blocks are compiled.")
    parser.add_argument("--steps", type=at_least(1), default=60, help="mini-batches")
    parser.add_argument("--chunks", type=at_least(1), default=4, help="micro-batches")
    parser.add_argument("--checkpoint", choices=CHECKPOINT, default="except_last")
    parser.add_argument("--backend", default="inductor", help="the backend of torch.compile")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()

    layers, devices = classifier(), places(3)
    plain = copy.deepcopy(layers).to(devices[0])
    # Each device has graphs of its own.
    torch._dynamo.config.recompile_limit = 8 * len({*devices})
    for layer in layers:
        if isinstance(layer, Block):
            layer.compile(backend=options.backend)
    model = GPipe(
        layers, [3, 3, 2], devices=devices, chunks=options.chunks, checkpoint=options.checkpoint
    )

    teacher = torch.randn(FEATURES, CLASSES)
    # Most mini-batches are of one size; every tenth has fewer rows.
    inputs = [torch.randn(64 - 7 * (k % 10 == 9), FEATURES) for k in range(options.steps)]
    batches = [(x.to(devices[0]), (x @ teacher).argmax(1).to(devices[0])) for x in inputs]
    losses, graphs = train(model, batches)
    expected, _ = train(plain, batches)

    difference = max(abs(a - b) for a, b in zip(losses, expected))
    print(f"losses      {losses[0]:.4f} to {losses[-1]:.4f}, plain {expected[-1]:.4f}")
    print(f"difference  {difference:.1e} at any step")
    print(f"graphs      {graphs[0]} after the first step, {graphs[-1]} after the last")
    half = len(graphs) // 2
    right = difference < 1e-3 and losses[-1] < losses[0] / 2 and 0 < graphs[half] == graphs[-1]
    if not right:
        print(
            "\nNot as it should be: losses differ by 1e-3 or more, or have not fallen to half, or"
        )
        print("nothing was compiled, or there were new graphs in the second half.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
